// libnvidia-ml.so.1: what torch asks of it without looking whether it is there.
#include <cstddef>

extern "C" {
int nvmlInit_v2() { return 0; }
int nvmlDeviceGetHandleByPciBusId_v2(const char*, void** device) { return *device = (void*)1, 0; }
int nvmlDeviceGetNvLinkRemoteDeviceType(void*, unsigned, int*) { return 3; }  // not supported
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void*, unsigned, void*) { return 3; }
int nvmlDeviceGetComputeRunningProcesses(void*, unsigned* count, void*) { return *count = 0, 0; }
int nvmlSystemGetCudaDriverVersion_v2(int* version) { return *version = 13000, 0; }
}
