#include <atomic>

#include "../update_math.h"
#include "launch.h"
#include "segment.cuh"

namespace shardgrad::cuda {
namespace {

// Each has four quads of a tile, whose loads are all in flight at once: on an H200 that is worth
// more than as many threads again.
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
  const Momentum momentum = args.state_count == 0 ? Momentum::kNone
      : rule.first                                ? Momentum::kFirst
                                                  : Momentum::kRunning;
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

// Most often all arrays are float, and there is no master. `kPlain` says so at compile time, and
// every branch over types is gone.
template <bool kPlain>
__device__ __forceinline__ Types types_of(const UpdateArguments& args) {
  if constexpr (kPlain) {
    constexpr DType kType = DType::kFloat32;
    return {kType, kType, {kType, kType}, Master::kNone, false};
  }
  return {
      args.param.dtype,
      args.grad.dtype,
      {args.states[0].dtype, args.states[1].dtype},
      args.master_kind,
      args.stochastic};
}

constexpr int kQuads = kTileQuads / kUpdateThreads;

// A thread's part of a tile: quads that lie as far from each other as the block has elements at a
// time.
struct Part {
  int64_t begin;  // of the first quad, in its row
  int64_t numel;  // of the row
  bool aligned;

  __device__ __forceinline__ int64_t place(int k) const {
    return begin + int64_t{k} * kUpdateThreads * kQuad;
  }
  __device__ __forceinline__ int count(int k) const {
    return static_cast<int>(min(static_cast<int64_t>(kQuad), numel - place(k)));
  }
  __device__ __forceinline__ bool whole(int k) const { return aligned && count(k) == kQuad; }
};

// N of a thread's quads of an array as they were loaded, in the bits of a C for each element. To
// convert an element is to wait for memory, so none is before all that a thread needs has been
// asked for.
template <class C, int N>
struct Loaded {
  uint32_t words[N][kQuad * sizeof(C) / sizeof(uint32_t)];
};

template <class C, int N>
using Values = C[N][kQuad];

// What is wider than C becomes a C at once.
template <class T, class C>
using KeptAs = std::conditional_t<(sizeof(T) > sizeof(C)), C, T>;

// Functions of several quads have the first one's number in `first`.
template <class T, class C, int N>
__device__ __forceinline__ void load_as(
    Loaded<C, N>& loaded, const void* data, int64_t offset, const Part& part, int first) {
#pragma unroll
  for (int k = 0; k < N; ++k) {
    T stored[kQuad] = {};
    load_bits(
        stored, data, offset + part.place(first + k), part.count(first + k), part.whole(first + k));
    KeptAs<T, C> kept[kQuad];
#pragma unroll
    for (int lane = 0; lane < kQuad; ++lane) kept[lane] = static_cast<KeptAs<T, C>>(stored[lane]);
    memcpy(loaded.words[k], kept, sizeof(kept));
  }
}

// The dtype is the same for a whole launch, so the branch costs little; a kernel for each mix of
// dtypes would cost hundreds of kernels.
template <class C, int N>
__device__ __forceinline__ void load(
    Loaded<C, N>& loaded, const void* data, DType dtype, int64_t offset, const Part& part,
    int first) {
  switch (dtype) {
    case DType::kFloat64:
      return load_as<double>(loaded, data, offset, part, first);
    case DType::kFloat32:
      return load_as<float>(loaded, data, offset, part, first);
    default:
      return load_as<uint16_t>(loaded, data, offset, part, first);
  }
}

template <class T, class C, int N>
__device__ __forceinline__ void convert_as(Values<C, N>& values, const Loaded<C, N>& loaded) {
#pragma unroll
  for (int k = 0; k < N; ++k) {
    KeptAs<T, C> kept[kQuad];
    memcpy(kept, loaded.words[k], sizeof(kept));
#pragma unroll
    for (int lane = 0; lane < kQuad; ++lane) values[k][lane] = static_cast<C>(to_float(kept[lane]));
  }
}

template <class C, int N>
__device__ __forceinline__ void convert(
    Values<C, N>& values, const Loaded<C, N>& loaded, DType dtype) {
  switch (dtype) {
    case DType::kBFloat16:
      return convert_as<BFloat16>(values, loaded);
    case DType::kFloat16:
      return convert_as<Float16>(values, loaded);
    case DType::kFloat64:
      return convert_as<double>(values, loaded);
    default:
      return convert_as<float>(values, loaded);
  }
}

template <class T, class C, int N>
__device__ __forceinline__ void store_as(
    const Values<C, N>& values, void* data, int64_t offset, const Part& part, int first) {
#pragma unroll
  for (int k = 0; k < N; ++k) {
    T stored[kQuad];
#pragma unroll
    for (int lane = 0; lane < kQuad; ++lane) stored[lane] = from_float<T>(values[k][lane]);
    store_bits(
        stored, data, offset + part.place(first + k), part.count(first + k), part.whole(first + k));
  }
}

template <class C, int N>
__device__ __forceinline__ void store(
    const Values<C, N>& values, void* data, DType dtype, int64_t offset, const Part& part,
    int first) {
  switch (dtype) {
    case DType::kBFloat16:
      return store_as<BFloat16>(values, data, offset, part, first);
    case DType::kFloat16:
      return store_as<Float16>(values, data, offset, part, first);
    case DType::kFloat64:
      return store_as<double>(values, data, offset, part, first);
    default:
      return store_as<float>(values, data, offset, part, first);
  }
}

// [Note: Exact weights] in weights.py.
template <class C, int N>
__device__ __forceinline__ void convert_weight(
    Values<C, N>& weight, const Loaded<C, N>& param, const Loaded<C, N>& master,
    const Types& types) {
  if constexpr (sizeof(C) == sizeof(float)) {
    if (types.master == Master::kRemainder) {
#pragma unroll
      for (int k = 0; k < N; ++k) {
        BFloat16 upper[kQuad];
        int16_t remainder[kQuad];
        memcpy(upper, param.words[k], sizeof(upper));
        memcpy(remainder, master.words[k], sizeof(remainder));
#pragma unroll
        for (int lane = 0; lane < kQuad; ++lane)
          weight[k][lane] = join_remainder(upper[lane], remainder[lane]);
      }
      return;
    }
    if (types.master == Master::kFloat32) {
      convert_as<float>(weight, master);
#pragma unroll
      for (int k = 0; k < N; ++k) {
        uint16_t bits[kQuad];
        memcpy(bits, param.words[k], sizeof(bits));
#pragma unroll
        for (int lane = 0; lane < kQuad; ++lane) {
          weight[k][lane] = types.param == DType::kBFloat16
              ? exact_weight(BFloat16{bits[lane]}, weight[k][lane])
              : exact_weight(Float16{bits[lane]}, weight[k][lane]);
        }
      }
      return;
    }
  }
  convert(weight, param, types.param);
}

template <class C, int N>
__device__ __forceinline__ void store_weight(
    const Values<C, N>& weight, const UpdateArguments& args, const Types& types,
    const SegmentRow& row, const Part& part, int first, uint64_t key) {
  if constexpr (sizeof(C) == sizeof(float)) {
    if (types.stochastic || types.master == Master::kRemainder) {
#pragma unroll
      for (int k = 0; k < N; ++k) {
        const int64_t at = part.place(first + k);
        const int count = part.count(first + k);
        const bool whole = part.whole(first + k);
        uint16_t param[kQuad], remainder[kQuad];
#pragma unroll
        for (int lane = 0; lane < kQuad; ++lane) {
          remainder[lane] = static_cast<uint16_t>(remainder_of(weight[k][lane]));
          param[lane] = types.stochastic
              ? round_stochastically(weight[k][lane], dither(key, row.param_offset + at + lane))
                    .bits
              : upper_half(weight[k][lane]).bits;
        }
        store_bits(param, args.param.data, row.param_offset + at, count, whole);
        if (!types.stochastic)
          store_bits(remainder, args.master, row.state_offset + at, count, whole);
      }
      return;
    }
    if (types.master == Master::kFloat32)
      store_as<float>(weight, args.master, row.state_offset, part, first);
  }
  store(weight, args.param.data, types.param, row.param_offset, part, first);
}

// All of a thread's part is asked for before the first of it is needed, so that the memory has
// something to do while a thread computes. Where types are known it is asked for in the order in
// which it is needed; elsewhere an array at a time, since it takes a branch over its type, and on
// an H200 that was faster by a quarter.
template <class Rule, class C, bool kPlain>
__device__ __forceinline__ void update_tile(
    const UpdateArguments& args, const SegmentRow& row, int64_t begin, const Rule& rule,
    bool aligned, uint64_t key) {
  constexpr int N = kPlain || sizeof(C) > sizeof(float) ? 1 : kQuads;
  const Types types = types_of<kPlain>(args);
  const Part part{begin + threadIdx.x * kQuad, row.numel, aligned};
  Loaded<C, N> grads[kQuads / N], params[kQuads / N], masters[kQuads / N] = {},
                                                                       loaded[kQuads / N][2] = {};
#pragma unroll
  for (int i = 0; i < kQuads / N; ++i) {
    load(grads[i], args.grad.data, types.grad, row.grad_offset, part, i * N);
    load(params[i], args.param.data, types.param, row.param_offset, part, i * N);
    if (types.master != Master::kNone) {
      const DType dtype = types.master == Master::kFloat32 ? DType::kFloat32 : DType::kBFloat16;
      load(masters[i], args.master, dtype, row.state_offset, part, i * N);
    }
#pragma unroll
    for (int s = 0; s < Rule::kStates; ++s) {
      if (s >= args.state_count) break;
      load(loaded[i][s], args.states[s].data, types.states[s], row.state_offset, part, i * N);
    }
  }
#pragma unroll
  for (int i = 0; i < kQuads / N; ++i) {
    Values<C, N> weight, grad, states[2] = {};
    convert(grad, grads[i], types.grad);
    convert_weight(weight, params[i], masters[i], types);
#pragma unroll
    for (int s = 0; s < Rule::kStates; ++s) {
      if (s < args.state_count) convert(states[s], loaded[i][s], types.states[s]);
    }
#pragma unroll
    for (int k = 0; k < N; ++k) {
#pragma unroll
      for (int lane = 0; lane < kQuad; ++lane) {
        C of_lane[2] = {states[0][k][lane], states[1][k][lane]};
        apply(args, rule, weight[k][lane], grad[k][lane], of_lane);
        states[0][k][lane] = of_lane[0];
        states[1][k][lane] = of_lane[1];
      }
    }
    store_weight(weight, args, types, row, part, i * N, key);
#pragma unroll
    for (int s = 0; s < Rule::kStates; ++s) {
      if (s >= args.state_count) break;
      store(states[s], args.states[s].data, types.states[s], row.state_offset, part, i * N);
    }
  }
}

__device__ bool is_row_aligned(const UpdateArguments& args, const SegmentRow& row) {
  bool aligned = is_aligned(args.param.data, size_of(args.param.dtype), row.param_offset) &&
      is_aligned(args.grad.data, size_of(args.grad.dtype), row.grad_offset);
  for (int k = 0; k < args.state_count; ++k) {
    aligned =
        aligned && is_aligned(args.states[k].data, size_of(args.states[k].dtype), row.state_offset);
  }
  if (args.master_kind != Master::kNone) {
    const int64_t nbytes = args.master_kind == Master::kFloat32 ? sizeof(float) : sizeof(int16_t);
    aligned = aligned && is_aligned(args.master, nbytes, row.state_offset);
  }
  return aligned;
}

// Blocks stride over the tiles, and a device holds all of them at once, so that each makes its
// rule, which takes powers in double, once. Every branch up to the quads goes the same way in a
// whole block. All tiles read the number of a row's last step, so the block that is done last
// advances the steps.
template <class Rule, class C, bool kPlain>
__global__ void __launch_bounds__(kUpdateThreads, 4)
    update_kernel(const __grid_constant__ UpdateArguments args) {
  if (args.found_inf != nullptr && *args.found_inf != 0) return;
  const Segment& segment = args.segment;
  __shared__ Rule rule;
  uint64_t key = 0;
  // what `rule` and `key` were made for: powers are slow, and mostly the same for all rows
  double rule_t = 0;
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
      cudaOccupancyMaxActiveBlocksPerMultiprocessor(
          &blocks, update_kernel<Rule, C, kPlain>, kUpdateThreads, 0) == cudaSuccess;
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
  for (int k = 0; k < args.state_count; ++k)
    plain = plain && args.states[k].dtype == DType::kFloat32;
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
  return shardgrad::cuda::launch<shardgrad::AdamRule>(
      *arguments, static_cast<cudaStream_t>(stream));
}

extern "C" int shardgrad_cuda_sgd(const shardgrad::UpdateArguments* arguments, void* stream) {
  return shardgrad::cuda::launch<shardgrad::SgdRule>(*arguments, static_cast<cudaStream_t>(stream));
}
