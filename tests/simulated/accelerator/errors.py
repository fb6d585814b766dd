"""What the simulated accelerator refuses, one class for each mistake. The C++ side raises them by
name.
"""

from __future__ import annotations


class SimulatedDeviceError(RuntimeError):
    """A program did what a real device would refuse, or get wrong."""


class OtherDeviceError(SimulatedDeviceError):
    """A stream of one device was used for an event or memory of another."""


class UnrecordedEventError(SimulatedDeviceError):
    """Somebody waits for an event that was never recorded: on CUDA a wait that silently orders
    nothing.
    """


class MixedDevicesError(SimulatedDeviceError):
    """One op, or one model, has tensors on several devices."""


class CaptureError(SimulatedDeviceError):
    """A capture or a replay that cannot be."""


class NestedCaptureError(CaptureError):
    """A capture, or a replay, inside a capture of the same device."""


class HostSyncInCaptureError(CaptureError):
    """The host waits for a device that is being captured: a synchronization, `.item()`, a blocking
    copy.
    """


class ForeignEventError(CaptureError):
    """An event crosses the border of a capture."""


class UnjoinedStreamError(CaptureError):
    """A capture ends while work on one of its streams is not joined to the stream it began on."""


class OutsideCaptureError(CaptureError):
    """A launch or an allocation on a stream that has not joined the capture of its device."""


class DefaultStreamCaptureError(CaptureError):
    """The default stream cannot be captured."""


class CollectiveFailedError(SimulatedDeviceError):
    """A rank is late, gone, or in another collective."""


class HazardError(AssertionError):
    """Accesses that nothing orders; the message lists them."""


TYPED = {
    error.__name__: error
    for error in (
        OtherDeviceError,
        UnrecordedEventError,
        MixedDevicesError,
        CaptureError,
        NestedCaptureError,
        HostSyncInCaptureError,
        ForeignEventError,
        UnjoinedStreamError,
        OutsideCaptureError,
        DefaultStreamCaptureError,
        CollectiveFailedError,
    )
}
