"""Tensor subclasses that say themselves what an all-gather moves."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils import _pytree as pytree

from tests.support.parity import Engine, Tensors, stack, train_squares

aten = torch.ops.aten
_KEEPS_CLASS = {
    aten.detach.default,
    aten.empty_like.default,
    aten.new_zeros.default,
    aten.slice.Tensor,
    aten.split.Tensor,
    aten.view.default,
    aten.as_strided.default,
    aten.alias.default,
    aten.copy_.default,
    aten.clone.default,
    aten._to_copy.default,
}


class Narrowed(Tensor):
    """Keeps float32 and gathers bfloat16.

    Attributes:
        calls: the arguments that `fsdp_pre_all_gather` was given last.
    """

    calls: ClassVar[dict[str, Any]] = {}

    @staticmethod
    def __new__(cls, data: Tensor) -> Narrowed:
        return Tensor._make_wrapper_subclass(  # type: ignore[attr-defined, no-any-return]
            cls, data.size(), data.stride(), data.storage_offset(),
            dtype=data.dtype, device=data.device, requires_grad=data.requires_grad,
        )  # fmt: skip

    def __init__(self, data: Tensor) -> None:
        self._data = data

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["_data"], None

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], meta: Any, size: Any, stride: Any
    ) -> Narrowed:
        return Narrowed(inner["_data"])

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._data})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        wrapped = next(t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Narrowed))
        unwrap = lambda t: t._data  # noqa: E731
        args, kwargs = pytree.tree_map_only(Narrowed, unwrap, (args, kwargs or {}))
        out = func(*args, **kwargs)
        if func not in _KEEPS_CLASS:
            return out
        return pytree.tree_map_only(Tensor, lambda t: type(wrapped)(t), out)

    def fsdp_pre_all_gather(
        self,
        mesh: DeviceMesh,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: nn.Module,
        mp_policy: MixedPrecisionPolicy,
    ) -> tuple[tuple[Tensor, ...], Any]:
        Narrowed.calls = {
            "mesh": mesh, "size": outer_size, "stride": outer_stride, "module": module,
            "policy": mp_policy,
        }  # fmt: skip
        rows = -(-outer_size[0] // mesh.size())
        data = self._data
        if data.size(0) != rows:
            padded = data.new_zeros(rows, *data.shape[1:])
            padded[: data.size(0)].copy_(data)
            data = padded
        return (data.to(torch.bfloat16),), {"scale": 1}

    def fsdp_post_all_gather(
        self,
        outputs: tuple[Tensor, ...],
        metadata: Any,
        param_dtype: torch.dtype,
        *,
        out: Any = None,
    ) -> Any:
        assert metadata == {"scale": 1}
        (gathered,) = outputs
        assert gathered.dtype == torch.bfloat16
        if out is not None:
            with torch.no_grad(), _unsafe_preserve_version_counter(out):
                out.copy_(gathered[: out.size(0)])
            return None
        wide = gathered.to(param_dtype)
        return wide, (wide,)


class Chunked(Narrowed):
    """Can be cut by `torch.chunk` alone, as torchao's NF4Tensor."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        if func is aten.slice.Tensor:
            sliced, dim, begin, end = args
            if begin != 0 or end < sliced.size(dim):
                raise NotImplementedError(f"slice of a {cls.__name__}")
        return super().__torch_dispatch__(func, types, args, kwargs)


class Quantized(Narrowed):
    """Gathers int8 and one scale a rank."""

    def fsdp_pre_all_gather(
        self, mesh: DeviceMesh, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        scale = self._data.abs().amax().clamp_min(1e-12) / 127
        return ((self._data / scale).round().to(torch.int8), scale.reshape(1)), None

    def fsdp_post_all_gather(
        self,
        outputs: tuple[Tensor, ...],
        metadata: Any,
        param_dtype: torch.dtype,
        *,
        out: Any = None,
    ) -> Any:
        numbers, scales = outputs
        Narrowed.calls["scales"] = scales.clone()
        pieces = numbers.chunk(len(scales))
        whole = torch.cat(
            [piece.to(param_dtype) * scale for piece, scale in zip(pieces, scales, strict=True)]
        )
        if out is None:
            return whole, (whole,)
        with torch.no_grad(), _unsafe_preserve_version_counter(out):
            out.copy_(whole.view_as(out))
        return None


class Scaled(Quantized):
    """As torchao's float8 weights: the scale is the same on all ranks, and not gathered; with the
    older signature, which gets the mesh only.
    """

    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> Any:  # type: ignore[override]
        scale = self._data.abs().amax() / 127
        dist.all_reduce(scale, dist.ReduceOp.MAX, group=mesh.get_group())
        return ((self._data / scale).round().to(torch.int8),), scale.reshape(1)

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, param_dtype: torch.dtype, **out: Any
    ) -> Any:
        return super().fsdp_post_all_gather((*outputs, metadata), None, param_dtype, **out)


class Blocked(Quantized):
    """Gathers float8 and a power of two for every 32 of them, as MXFP8 weights."""

    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> Any:  # type: ignore[override]
        blocks = self._data.view(-1, 32)
        scales = (blocks.abs().amax(1) / 448).to(torch.float8_e8m0fnu)  # rounded to 2**n
        numbers = (blocks / scales.float()[:, None]).clamp(-448, 448).to(torch.float8_e4m3fn)
        packed = numbers.view_as(self._data).view(torch.uint8)
        return (packed, scales.view(torch.uint8)), None

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, param_dtype: torch.dtype, **out: Any
    ) -> Any:
        numbers, scales = outputs
        blocks = numbers.view(torch.float8_e4m3fn).to(param_dtype).view(-1, 32)
        powers = scales.view(torch.float8_e8m0fnu).to(param_dtype)
        whole = (blocks * powers[:, None]).view_as(numbers)
        given = out.get("out")
        if given is None:
            return whole, (whole,)
        with torch.no_grad(), _unsafe_preserve_version_counter(given):
            given.copy_(whole)
        return None


class Half(Tensor):
    """Has one of the two methods only."""

    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> Any:
        raise NotImplementedError


def extended(kind: type[Narrowed], *sizes: int, on_meta: bool = False) -> nn.Sequential:
    """Returns linear layers whose weights, but not their biases, are of `kind`."""
    model = stack(*sizes)
    if on_meta:
        model = model.to("meta")
    for layer in model:
        if isinstance(layer, nn.Linear):
            layer.weight = nn.Parameter(kind(layer.weight.detach()))
    return model


def unwrapped(found: Tensors) -> Tensors:
    return {name: getattr(value, "_data", value) for name, value in found.items()}


def train(
    engine: Engine,
    kind: type[Narrowed],
    sizes: tuple[int, ...],
    *,
    optimizer: str = "adamw",
    micro_batches: int = 1,
    sync_each: bool = True,
    **options: Any,
) -> Tensors:
    model = engine.shard_stack(extended(kind, *sizes), **options)
    loop = {"optimizer": optimizer, "micro_batches": micro_batches, "sync_each": sync_each}
    return unwrapped(train_squares(engine, model, sizes[0], **loop))
