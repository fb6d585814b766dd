#include <atomic>

#include "../update_math.h"
#include "launch.h"
#include "segment.cuh"

namespace shardgrad::cuda {
namespace {

// Each has four quads of a tile, whose loads are all in flight at once: on an H200 that is worth more than as many
// threads again.
constexpr int kUpdateThreads = 128;
static_assert(kTileQuads % kUpdateThreads == 0, "every thread has as many quads of a full tile");
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

// What the arrays hold.
struct Types {
  DType param;
  DType grad;
  DType states[2];
  Master master;
  bool stochastic;
};

// Most often all arrays are float, and there is no master. `kPlain` says so at compile time, and every branch over
// types is gone.
template <bool kPlain>
__device__ __forceinline__ Types types_of(const UpdateArguments& args) {
  if constexpr (kPlain) {
    constexpr DType kType = DType::kFloat32;
    return {kType, kType, {kType, kType}, Master::kNone, false};
  }
  return {args.param.dtype, args.grad.dtype, {args.states[0].dtype, args.states[1].dtype}, args.master_kind,
          args.stochastic};
}

constexpr int kQuads = kTileQuads / kUpdateThreads;

// A thread's part of a tile: quads that lie as far from each other as the block has elements at a time.
struct Part {
  int64_t begin;  // of the first quad, in its row
  int64_t numel;  // of the row
  bool aligned;

  __device__ __forceinline__ int64_t place(int k) const { return begin + int64_t{k} * kUpdateThreads * kQuad; }
  __device__ __forceinline__ int count(int k) const {
    return static_cast<int>(min(static_cast<int64_t>(kQuad), numel - place(k)));
  }
  __device__ __forceinline__ bool whole(int k) const { return aligned && count(k) == kQuad; }
};

// A thread's quads of an array, as they were loaded, in the bits of a C for each element. To convert an element is
// to wait for memory, so none is before all that a thread needs has been asked for.
template <class C>
struct Loaded {
  uint32_t words[kQuads][kQuad * sizeof(C) / sizeof(uint32_t)];
};

// What is wider than C becomes a C at once.
template <class T, class C>
using KeptAs = std::conditional_t<(sizeof(T) > sizeof(C)), C, T>;

template <class T, class C>
__device__ __forceinline__ void load_as(Loaded<C>& loaded, const void* data, int64_t offset, const Part& part) {
#pragma unroll
  for (int k = 0; k < kQuads; ++k) {
    T stored[kQuad] = {};
    load_bits(stored, data, offset + part.place(k), part.count(k), part.whole(k));
    KeptAs<T, C> kept[kQuad];
#pragma unroll
    for (int lane = 0; lane < kQuad; ++lane) kept[lane] = static_cast<KeptAs<T, C>>(stored[lane]);
    memcpy(loaded.words[k], kept, sizeof(kept));
  }
}

// The dtype is the same for a whole launch, so the branch costs little; a kernel for each mix of dtypes would
// cost hundreds of kernels.
template <class C>
__device__ __forceinline__ void load(
    Loaded<C>& loaded, const void* data, DType dtype, int64_t offset, const Part& part) {
  switch (dtype) {
    case DType::kFloat64:
      return load_as<double>(loaded, data, offset, part);
    case DType::kFloat32:
      return load_as<float>(loaded, data, offset, part);
    default:
      return load_as<uint16_t>(loaded, data, offset, part);
  }
}

template <class T, class C>
__device__ __forceinline__ void convert_as(C (&values)[kQuad], const Loaded<C>& loaded, int k) {
  KeptAs<T, C> kept[kQuad];
  memcpy(kept, loaded.words[k], sizeof(kept));
#pragma unroll
  for (int lane = 0; lane < kQuad; ++lane) values[lane] = static_cast<C>(to_float(kept[lane]));
}

template <class C>
__device__ __forceinline__ void convert(C (&values)[kQuad], const Loaded<C>& loaded, DType dtype, int k) {
  switch (dtype) {
    case DType::kBFloat16:
      return convert_as<BFloat16>(values, loaded, k);
    case DType::kFloat16:
      return convert_as<Float16>(values, loaded, k);
    case DType::kFloat64:
      return convert_as<double>(values, loaded, k);
    default:
      return convert_as<float>(values, loaded, k);
  }
}

template <class T, class C>
__device__ __forceinline__ void store_as(
    const C (&values)[kQuad], void* data, int64_t offset, const Part& part, int k) {
  T stored[kQuad];
#pragma unroll
  for (int lane = 0; lane < kQuad; ++lane) stored[lane] = from_float<T>(values[lane]);
  store_bits(stored, data, offset + part.place(k), part.count(k), part.whole(k));
}

template <class C>
__device__ __forceinline__ void store(
    const C (&values)[kQuad], void* data, DType dtype, int64_t offset, const Part& part, int k) {
  switch (dtype) {
    case DType::kBFloat16:
      return store_as<BFloat16>(values, data, offset, part, k);
    case DType::kFloat16:
      return store_as<Float16>(values, data, offset, part, k);
    case DType::kFloat64:
      return store_as<double>(values, data, offset, part, k);
    default:
      return store_as<float>(values, data, offset, part, k);
  }
}

// [Note: Exact weights] in weights.py.
template <class C>
__device__ __forceinline__ void convert_weight(
    C (&weight)[kQuad], const Loaded<C>& param, const Loaded<C>& master, const Types& types, int k) {
  if constexpr (sizeof(C) == sizeof(float)) {
    if (types.master != Master::kNone) {
      uint16_t bits[kQuad], remainder[kQuad];
      memcpy(bits, param.words[k], sizeof(bits));
      memcpy(remainder, master.words[k], sizeof(remainder));
      convert_as<float>(weight, master, k);
#pragma unroll
      for (int lane = 0; lane < kQuad; ++lane) {
        weight[lane] = types.master == Master::kRemainder
            ? join_remainder(BFloat16{bits[lane]}, static_cast<int16_t>(remainder[lane]))
            : types.param == DType::kBFloat16 ? exact_weight(BFloat16{bits[lane]}, weight[lane])
                                              : exact_weight(Float16{bits[lane]}, weight[lane]);
      }
      return;
    }
  }
  convert(weight, param, types.param, k);
}

template <class C>
__device__ __forceinline__ void store_weight(
    const C (&weight)[kQuad], const UpdateArguments& args, const Types& types, const SegmentRow& row,
    const Part& part, int k, uint64_t key) {
  if constexpr (sizeof(C) == sizeof(float)) {
    if (types.stochastic || types.master == Master::kRemainder) {
      const int64_t at = row.param_offset + part.place(k);
      uint16_t param[kQuad], remainder[kQuad];
#pragma unroll
      for (int lane = 0; lane < kQuad; ++lane) {
        remainder[lane] = static_cast<uint16_t>(remainder_of(weight[lane]));
        param[lane] = types.stochastic ? round_stochastically(weight[lane], dither(key, at + lane)).bits
                                       : upper_half(weight[lane]).bits;
      }
      store_bits(param, args.param.data, at, part.count(k), part.whole(k));
      if (types.stochastic) return;
      store_bits(remainder, args.master, row.state_offset + part.place(k), part.count(k), part.whole(k));
      return;
    }
    if (types.master == Master::kFloat32) store_as<float>(weight, args.master, row.state_offset, part, k);
  }
  store(weight, args.param.data, types.param, row.param_offset, part, k);
}

// All of a thread's part is asked for before the first of it is needed, so that the memory has something to do
// while a thread computes.
template <class Rule, class C, bool kPlain>
__device__ __forceinline__ void update_tile(
    const UpdateArguments& args, const SegmentRow& row, int64_t begin, const Rule& rule, bool aligned, uint64_t key) {
  const Types types = types_of<kPlain>(args);
  const Part part{begin + threadIdx.x * kQuad, row.numel, aligned};
  Loaded<C> grad, param, master = {}, states[2] = {};
  load(grad, args.grad.data, types.grad, row.grad_offset, part);
  load(param, args.param.data, types.param, row.param_offset, part);
  if (types.master != Master::kNone) {
    const DType dtype = types.master == Master::kFloat32 ? DType::kFloat32 : DType::kBFloat16;
    load(master, args.master, dtype, row.state_offset, part);
  }
#pragma unroll
  for (int s = 0; s < Rule::kStates; ++s) {
    if (s < args.state_count) load(states[s], args.states[s].data, types.states[s], row.state_offset, part);
  }
#pragma unroll
  for (int k = 0; k < kQuads; ++k) {
    C weight[kQuad], gradient[kQuad], state[2][kQuad] = {};
    convert(gradient, grad, types.grad, k);
    convert_weight(weight, param, master, types, k);
#pragma unroll
    for (int s = 0; s < Rule::kStates; ++s) convert(state[s], states[s], types.states[s], k);
#pragma unroll
    for (int lane = 0; lane < kQuad; ++lane) {
      C of_lane[2] = {state[0][lane], state[1][lane]};
      apply(args, rule, weight[lane], gradient[lane], of_lane);
      state[0][lane] = of_lane[0];
      state[1][lane] = of_lane[1];
    }
    store_weight(weight, args, types, row, part, k, key);
#pragma unroll
    for (int s = 0; s < Rule::kStates; ++s) {
      if (s < args.state_count) store(state[s], args.states[s].data, types.states[s], row.state_offset, part, k);
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
template <class Rule, class C, bool kPlain>
__global__ void __launch_bounds__(kUpdateThreads, 4) update_kernel(const __grid_constant__ UpdateArguments args) {
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
    update_tile<Rule, C, kPlain>(
        args, row, (tile - row.first_tile) * kTileNumel, rule, is_row_aligned(args, row), key);
  }
  if (!is_last_block(reinterpret_cast<unsigned int*>(args.ticket))) return;
  for (int64_t r = threadIdx.x; r < segment.row_count; r += kUpdateThreads) {
    if (counts_step(segment, r)) args.steps[segment.rows[r].step_index] += 1;
  }
}

// Blocks of a kernel that the current device holds at once; 0 if the runtime cannot say.
template <class Rule, class C, bool kPlain>
int resident_blocks() {
  static std::atomic<int> known[kDevices];
  int device = 0, processors = 0, blocks = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return 0;
  if (device < kDevices && known[device] != 0) return known[device];
  const bool said =
      cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device) == cudaSuccess &&
      cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, update_kernel<Rule, C, kPlain>, kUpdateThreads, 0) ==
          cudaSuccess;
  if (said && device < kDevices) known[device] = processors * blocks;
  return said ? processors * blocks : 0;
}

// A segment without elements still counts steps.
template <class Rule, class C, bool kPlain>
cudaError_t launch(const UpdateArguments& args, cudaStream_t stream) {
  if (args.segment.row_count == 0) return cudaSuccess;
  const int64_t most = resident_blocks<Rule, C, kPlain>();
  if (most == 0) return cudaGetLastError();
  const auto blocks = static_cast<unsigned>(std::clamp<int64_t>(args.segment.tiles, 1, most));
  update_kernel<Rule, C, kPlain><<<blocks, kUpdateThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

// Whether `types_of` may say so.
bool is_plain(const UpdateArguments& args) {
  bool plain = args.master_kind == Master::kNone && args.param.dtype == DType::kFloat32;
  plain = plain && args.grad.dtype == DType::kFloat32;
  for (int k = 0; k < args.state_count; ++k) plain = plain && args.states[k].dtype == DType::kFloat32;
  return plain;
}

template <template <class> class Rule>
cudaError_t launch(const UpdateArguments& args, cudaStream_t stream) {
  if (is_plain(args)) return launch<Rule<float>, float, true>(args, stream);
  return args.param.dtype == DType::kFloat64 ? launch<Rule<double>, double, false>(args, stream)
                                             : launch<Rule<float>, float, false>(args, stream);
}

}  // namespace
}  // namespace shardgrad::cuda

extern "C" int shardgrad_cuda_adam(const shardgrad::UpdateArguments* arguments, void* stream) {
  return shardgrad::cuda::launch<shardgrad::AdamRule>(*arguments, static_cast<cudaStream_t>(stream));
}

extern "C" int shardgrad_cuda_sgd(const shardgrad::UpdateArguments* arguments, void* stream) {
  return shardgrad::cuda::launch<shardgrad::SgdRule>(*arguments, static_cast<cudaStream_t>(stream));
}
