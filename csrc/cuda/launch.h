// Launchers with a plain C interface: the .cu files see no torch header, so any nvcc compiles them
// in seconds.
//
// Each enqueues on `stream` only, allocates nothing, reads nothing back and keeps no pointer to its
// arguments after returning: everything a kernel needs travels by value with the launch. That makes
// them safe under graph capture. Each returns a cudaError_t; 0 is success.
#pragma once

#include "../arguments.h"
#include "../segment.h"

extern "C" {

// Chunks a single sum can take: their addresses must fit the parameters of one launch.
enum { shardgrad_cuda_max_summands = 1024 };

int shardgrad_cuda_pack(const shardgrad::PackArguments* arguments, void* stream);
int shardgrad_cuda_unpack(const shardgrad::UnpackArguments* arguments, void* stream);
int shardgrad_cuda_sum_chunks(const shardgrad::SumArguments* arguments, void* stream);

// The tables of these lie in device memory, and so does every number that changes from step to
// step.
int shardgrad_cuda_adam(const shardgrad::UpdateArguments* arguments, void* stream);
int shardgrad_cuda_sgd(const shardgrad::UpdateArguments* arguments, void* stream);
int shardgrad_cuda_norm(const shardgrad::NormArguments* arguments, void* stream);

const char* shardgrad_cuda_error(int status);

}  // extern "C"
