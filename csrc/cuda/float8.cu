#include "../float8.h"
#include "combine.cuh"
#include "launch.h"

namespace shardgrad::cuda {
namespace {

// A block of values for each 32 threads, which load 16 bytes each; the largest magnitude goes over shared
// memory, of which all threads of a block of values read the same 32 words.
constexpr int kLanes = 32;
constexpr int kPerLane = kFloat8Block / kLanes;
constexpr int kBlocksAtOnce = kThreads / kLanes;
constexpr uint32_t kHasValue = 0x80000000u;

struct alignas(4) Codes {
  uint8_t lanes[kPerLane];
};

struct Quantize {
  QuantizeArguments args;
};

__global__ void __launch_bounds__(kThreads) quantize_kernel(const __grid_constant__ Quantize batch) {
  __shared__ uint32_t shared[kThreads];
  const QuantizeArguments& args = batch.args;
  const uint32_t blocks = static_cast<uint32_t>(args.blocks);
  const uint32_t row_blocks = static_cast<uint32_t>(args.row_blocks);
  const uint32_t period = static_cast<uint32_t>(args.period), tail = static_cast<uint32_t>(args.tail);
  const int lane = threadIdx.x % kLanes, own = threadIdx.x / kLanes;
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * kBlocksAtOnce; first < args.blocks;
       first += static_cast<int64_t>(gridDim.x) * kBlocksAtOnce) {
    const uint32_t b = static_cast<uint32_t>(first) + own;
    const int64_t at = static_cast<int64_t>(b) * kLanes + lane;
    const bool is_there = b < blocks;
    const bool is_tail = is_there && b % period >= tail;
    Vector<float, kPerLane> total = {};
    uint32_t found = 0;
    if (is_there) {
      total = reinterpret_cast<const Vector<float, kPerLane>*>(args.values)[at];
      const Codes kept = reinterpret_cast<const Codes*>(args.kept)[at];
      const float owed = scale_of(args.kept[args.blocks * kFloat8Block + b] - kLossShift);
#pragma unroll
      for (int j = 0; j < kPerLane; ++j) {
        float& value = total.lanes[j];
        if ((bit_cast<uint32_t>(value) & 0x7fffffffu) != 0) found |= kHasValue;
        if (is_tail) {
          value = value > kLargestCode ? kLargestCode : value;
        } else {
          value = value + float8_value(kept.lanes[j]) * owed;
        }
        const uint32_t magnitude = bit_cast<uint32_t>(value) & 0x7fffffffu;
        const uint32_t finite = magnitude < kInfinityBits ? magnitude : 0u;
        if (finite > (found & ~kHasValue)) found = (found & kHasValue) | finite;
      }
    }
    shared[threadIdx.x] = found;
    __syncthreads();
    uint32_t largest = 0, has_value = 0;
#pragma unroll
    for (int j = 0; j < kLanes; ++j) {
      const uint32_t other = shared[own * kLanes + j];
      has_value |= other & kHasValue;
      largest = max(largest, other & ~kHasValue);
    }
    __syncthreads();
    if (!is_there) continue;
    const bool is_empty = !is_tail && has_value == 0;
    const int exponent = is_tail ? kUnitExponent : is_empty ? 0 : exponent_for(largest);
    const float scale = scale_of(exponent), inverse = inverse_scale_of(exponent);
    const float inverse_of_loss = inverse_scale_of(exponent - kLossShift);
    Codes codes = {}, losses = {};
    if (!is_empty) {
#pragma unroll
      for (int j = 0; j < kPerLane; ++j) {
        codes.lanes[j] = float8_code(total.lanes[j] * inverse);
        losses.lanes[j] = loss_code(total.lanes[j], codes.lanes[j], scale, inverse_of_loss);
      }
    }
    uint8_t* const row = args.message + static_cast<int64_t>(b / row_blocks) * args.row_nbytes;
    const uint32_t place = b % row_blocks;
    reinterpret_cast<Codes*>(row)[static_cast<int64_t>(place) * kLanes + lane] = codes;
    if (lane == 0) row[args.row_blocks * kFloat8Block + place] = static_cast<uint8_t>(exponent);
    if (is_tail || is_empty) continue;
    reinterpret_cast<Codes*>(args.kept)[at] = losses;
    if (lane == 0) args.kept[args.blocks * kFloat8Block + b] = static_cast<uint8_t>(exponent);
  }
}

// Sixteen codes for each thread, one load of each message.
constexpr int kCodes = 16;
constexpr int kPieces = kFloat8Block / kCodes;

struct SumQuantized {
  const uint8_t* messages[shardgrad_cuda_max_summands];
  float* out;
  int64_t pieces;
  int64_t row_nbytes;
  uint32_t row_blocks;
  int count;
};

__global__ void __launch_bounds__(kThreads) sum_quantized_kernel(const __grid_constant__ SumQuantized batch) {
  for (int64_t piece = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; piece < batch.pieces;
       piece += static_cast<int64_t>(gridDim.x) * kThreads) {
    const uint32_t b = static_cast<uint32_t>(piece / kPieces), place = b % batch.row_blocks;
    const int64_t row = static_cast<int64_t>(b / batch.row_blocks) * batch.row_nbytes;
    const int64_t codes_at = row + static_cast<int64_t>(place) * kFloat8Block + piece % kPieces * kCodes;
    const int64_t exponent_at = row + static_cast<int64_t>(batch.row_blocks) * kFloat8Block + place;
    float sums[kCodes];
#pragma unroll 4
    for (int k = 0; k < batch.count; ++k) {
      const auto codes = *reinterpret_cast<const Vector<uint8_t, kCodes>*>(batch.messages[k] + codes_at);
      const float scale = scale_of(batch.messages[k][exponent_at]);
#pragma unroll
      for (int j = 0; j < kCodes; ++j) {
        const float value = float8_value(codes.lanes[j]) * scale;
        sums[j] = k == 0 ? value : sums[j] + value;
      }
    }
    auto* to = reinterpret_cast<Vector<float, 4>*>(batch.out) + piece * (kCodes / 4);
#pragma unroll
    for (int v = 0; v < kCodes / 4; ++v) {
      to[v] = {{sums[4 * v], sums[4 * v + 1], sums[4 * v + 2], sums[4 * v + 3]}};
    }
  }
}

bool is_aligned_to(int64_t nbytes, const void* address) {
  return reinterpret_cast<uintptr_t>(address) % static_cast<uintptr_t>(nbytes) == 0;
}

// What the kernels divide by counts blocks, in 32 bits.
bool is_small(int64_t blocks) { return blocks < (int64_t{1} << 32); }

cudaError_t quantize(const QuantizeArguments& args, cudaStream_t stream) {
  if (args.blocks == 0) return cudaSuccess;
  const bool aligned = is_aligned_to(16, args.values) && is_aligned_to(4, args.kept) &&
      is_aligned_to(4, args.message) && args.row_nbytes % 4 == 0;
  if (!aligned || !is_small(args.blocks) || !is_small(args.period) || !is_small(args.row_blocks)) {
    return cudaErrorInvalidValue;
  }
  const Quantize batch{args};
  const int64_t groups = (args.blocks + kBlocksAtOnce - 1) / kBlocksAtOnce;
  quantize_kernel<<<blocks_for(groups), kThreads, 0, stream>>>(batch);
  return cudaGetLastError();
}

cudaError_t sum_quantized(const SumQuantizedArguments& args, cudaStream_t stream) {
  if (args.blocks == 0) return cudaSuccess;
  const auto is_aligned_message = [](const void* message) { return is_aligned_to(16, message); };
  const bool aligned = is_aligned_to(16, args.out) && args.row_nbytes % 16 == 0 &&
      std::all_of(args.messages.begin(), args.messages.end(), is_aligned_message);
  const bool fits = args.messages.size() <= shardgrad_cuda_max_summands;
  if (!aligned || !fits || !is_small(args.blocks) || !is_small(args.row_blocks)) return cudaErrorInvalidValue;
  SumQuantized batch{};
  std::copy(args.messages.begin(), args.messages.end(), batch.messages);
  batch.out = args.out;
  batch.pieces = args.blocks * kPieces;
  batch.row_nbytes = args.row_nbytes;
  batch.row_blocks = static_cast<uint32_t>(args.row_blocks);
  batch.count = static_cast<int>(args.messages.size());
  const int64_t groups = (batch.pieces + kThreads - 1) / kThreads;
  sum_quantized_kernel<<<blocks_for(groups), kThreads, 0, stream>>>(batch);
  return cudaGetLastError();
}

}  // namespace
}  // namespace shardgrad::cuda

extern "C" int shardgrad_cuda_quantize(const shardgrad::QuantizeArguments* arguments, void* stream) {
  return shardgrad::cuda::quantize(*arguments, static_cast<cudaStream_t>(stream));
}

extern "C" int shardgrad_cuda_sum_quantized(const shardgrad::SumQuantizedArguments* arguments, void* stream) {
  return shardgrad::cuda::sum_quantized(*arguments, static_cast<cudaStream_t>(stream));
}
