#include <atomic>

#include "../update_math.h"
#include "launch.h"
#include "segment.cuh"

namespace shardgrad::cuda {
namespace {

constexpr int kDevices = 64;  // whose number of resident blocks is remembered

template <class C>
__device__ __forceinline__ void apply(
    const UpdateArguments&, const AdamRule<C>& rule, C& weight, C grad, C (&states)[2]) {
  AdamRule<C>::update(rule, rule.couples, weight, grad, states[0], states[1]);
}

template <class C>
__device__ __forceinline__ void apply(
    const UpdateArguments& args, const SgdRule<C>& rule, C& weight, C grad, C (&states)[2]) {
  const Momentum momentum =
      args.state_count == 0 ? Momentum::kNone : rule.first ? Momentum::kFirst : Momentum::kRunning;
  SgdRule<C>::update(rule, rule.couples, momentum, args.nesterov, weight, grad, states[0]);
}

// A thread's elements of one row: where they are in each array, and how many.
struct Place {
  int64_t param;
  int64_t grad;
  int64_t state;
  int count;
  bool whole;
};

// [Note: Exact weights] in weights.py.
template <class C>
__device__ __forceinline__ void load_weight(const UpdateArguments& args, const Place& at, C (&weight)[kQuad]) {
  if constexpr (sizeof(C) == sizeof(float)) {
    if (args.master_kind != Master::kNone) {
      uint16_t param[kQuad] = {}, remainder[kQuad] = {};
      load_bits(param, args.param.data, at.param, at.count, at.whole);
      const bool is_split = args.master_kind == Master::kRemainder;
      if (is_split) {
        load_bits(remainder, args.master, at.state, at.count, at.whole);
      } else {
        load_as<float>(weight, args.master, at.state, at.count, at.whole);
      }
#pragma unroll
      for (int lane = 0; lane < kQuad; ++lane) {
        weight[lane] = is_split ? join_remainder(BFloat16{param[lane]}, static_cast<int16_t>(remainder[lane]))
            : args.param.dtype == DType::kBFloat16 ? exact_weight(BFloat16{param[lane]}, weight[lane])
                                                   : exact_weight(Float16{param[lane]}, weight[lane]);
      }
      return;
    }
  }
  load(weight, args.param.data, args.param.dtype, at.param, at.count, at.whole);
}

template <class C>
__device__ __forceinline__ void store_weight(
    const UpdateArguments& args, const Place& at, uint64_t key, const C (&weight)[kQuad]) {
  if constexpr (sizeof(C) == sizeof(float)) {
    if (args.stochastic || args.master_kind == Master::kRemainder) {
      uint16_t param[kQuad], remainder[kQuad];
#pragma unroll
      for (int lane = 0; lane < kQuad; ++lane) {
        remainder[lane] = static_cast<uint16_t>(remainder_of(weight[lane]));
        param[lane] = args.stochastic
            ? round_stochastically(weight[lane], dither(key, at.param + lane)).bits
            : upper_half(weight[lane]).bits;
      }
      store_bits(param, args.param.data, at.param, at.count, at.whole);
      if (!args.stochastic) store_bits(remainder, args.master, at.state, at.count, at.whole);
      return;
    }
    if (args.master_kind == Master::kFloat32) store_as<float>(weight, args.master, at.state, at.count, at.whole);
  }
  store(weight, args.param.data, args.param.dtype, at.param, at.count, at.whole);
}

template <class Rule, class C>
__device__ __forceinline__ void update_quad(
    const UpdateArguments& args, const Rule& rule, const Place& at, uint64_t key) {
  C weight[kQuad] = {}, grad[kQuad] = {}, states[2][kQuad] = {};
  load(grad, args.grad.data, args.grad.dtype, at.grad, at.count, at.whole);
  load_weight(args, at, weight);
#pragma unroll
  for (int k = 0; k < Rule::kStates; ++k) {
    if (k < args.state_count) {
      load(states[k], args.states[k].data, args.states[k].dtype, at.state, at.count, at.whole);
    }
  }
#pragma unroll
  for (int lane = 0; lane < kQuad; ++lane) {
    C of_lane[2] = {states[0][lane], states[1][lane]};
    apply(args, rule, weight[lane], grad[lane], of_lane);
    states[0][lane] = of_lane[0];
    states[1][lane] = of_lane[1];
  }
  store_weight(args, at, key, weight);
#pragma unroll
  for (int k = 0; k < Rule::kStates; ++k) {
    if (k < args.state_count) {
      store(states[k], args.states[k].data, args.states[k].dtype, at.state, at.count, at.whole);
    }
  }
}

__device__ bool is_row_aligned(const UpdateArguments& args, const SegmentRow& row) {
  bool aligned = is_aligned(args.param.data, size_of(args.param.dtype), row.param_offset) &&
      is_aligned(args.grad.data, size_of(args.grad.dtype), row.grad_offset);
  for (int k = 0; k < args.state_count; ++k) {
    aligned = aligned && is_aligned(args.states[k].data, size_of(args.states[k].dtype), row.state_offset);
  }
  if (args.master_kind != Master::kNone) {
    const int64_t nbytes = args.master_kind == Master::kFloat32 ? sizeof(float) : sizeof(int16_t);
    aligned = aligned && is_aligned(args.master, nbytes, row.state_offset);
  }
  return aligned;
}

// Blocks stride over the tiles, and a device holds all of them at once, so that each makes its rule, which takes
// powers in double, once. Every branch up to the quads goes the same way in a whole block. All tiles read
// the number of a row's last step, so the block that is done last advances the steps.
template <class Rule, class C>
__global__ void __launch_bounds__(kThreads, sizeof(C) == sizeof(float) ? 4 : 2) update_kernel(const __grid_constant__ UpdateArguments args) {
  if (args.found_inf != nullptr && *args.found_inf != 0) return;
  const Segment& segment = args.segment;
  __shared__ Rule rule;
  uint64_t key = 0;
  double rule_t = 0;  // what `rule` and `key` were made for: powers are slow, and mostly the same for all rows
  int64_t i = 0;
  for (int64_t tile = blockIdx.x; tile < segment.tiles; tile += gridDim.x) {
    i = find_row_from(segment, i, tile);
    const SegmentRow row = segment.rows[i];
    if (!is_live(segment, row)) continue;
    const double t = static_cast<double>(args.steps[row.step_index]) + 1;
    if (t != rule_t) {
      __syncthreads();
      if (threadIdx.x == 0) {
        const C gain = static_cast<C>(args.scale.read()) * static_cast<C>(args.maximize ? -1 : 1);
        rule = Rule::of(args.hyper, gain, t, args.decoupled);
      }
      __syncthreads();
      key = dither_key(args.seed, t);
      rule_t = t;
    }
    const bool aligned = is_row_aligned(args, row);
    const int64_t begin = (tile - row.first_tile) * kTileNumel;
#pragma unroll
    for (int64_t quad = threadIdx.x; quad < kTileQuads; quad += kThreads) {
      const int64_t at = begin + quad * kQuad;
      if (at >= row.numel) break;
      const int count = static_cast<int>(min(static_cast<int64_t>(kQuad), row.numel - at));
      const Place place{
          row.param_offset + at, row.grad_offset + at, row.state_offset + at, count, aligned && count == kQuad};
      update_quad<Rule, C>(args, rule, place, key);
    }
  }
  if (!is_last_block(reinterpret_cast<unsigned int*>(args.ticket))) return;
  for (int64_t r = threadIdx.x; r < segment.row_count; r += kThreads) {
    if (is_live(segment, segment.rows[r])) args.steps[segment.rows[r].step_index] += 1;
  }
}

// Blocks of a kernel that the current device holds at once; 0 if the runtime cannot say.
template <class Rule, class C>
int resident_blocks() {
  static std::atomic<int> known[kDevices];
  int device = 0, processors = 0, blocks = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return 0;
  if (device < kDevices && known[device] != 0) return known[device];
  const bool said =
      cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device) == cudaSuccess &&
      cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, update_kernel<Rule, C>, kThreads, 0) == cudaSuccess;
  if (said && device < kDevices) known[device] = processors * blocks;
  return said ? processors * blocks : 0;
}

// A segment without elements still counts steps.
template <class Rule, class C>
cudaError_t launch(const UpdateArguments& args, cudaStream_t stream) {
  if (args.segment.row_count == 0) return cudaSuccess;
  const int64_t most = resident_blocks<Rule, C>();
  if (most == 0) return cudaGetLastError();
  const auto blocks = static_cast<unsigned>(std::clamp<int64_t>(args.segment.tiles, 1, most));
  update_kernel<Rule, C><<<blocks, kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

template <template <class> class Rule>
cudaError_t launch(const UpdateArguments& args, cudaStream_t stream) {
  return args.param.dtype == DType::kFloat64 ? launch<Rule<double>, double>(args, stream)
                                             : launch<Rule<float>, float>(args, stream);
}

}  // namespace
}  // namespace shardgrad::cuda

extern "C" int shardgrad_cuda_adam(const shardgrad::UpdateArguments* arguments, void* stream) {
  return shardgrad::cuda::launch<shardgrad::AdamRule>(*arguments, static_cast<cudaStream_t>(stream));
}

extern "C" int shardgrad_cuda_sgd(const shardgrad::UpdateArguments* arguments, void* stream) {
  return shardgrad::cuda::launch<shardgrad::SgdRule>(*arguments, static_cast<cudaStream_t>(stream));
}
