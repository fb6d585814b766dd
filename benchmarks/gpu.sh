#!/usr/bin/env bash
# Everything that wants GPUs, in parts that can be continued, and a report last.
#
#   bash benchmarks/gpu.sh                       one machine, with one GPU or more
#   bash benchmarks/gpu.sh --nnodes 2 --rdzv-endpoint 10.0.0.1:29500
#                                                on each of two machines, at about the same time
#
#   --stage 1      is it right: kernels, order, captures, NCCL          (one machine only)
#   --stage 2      how long steps take, beside other engines
#   --stage 3      kernels, sizes of batches                            (one machine only)
#   --out DIR      into DIR instead of benchmarks/results/gpu_<hardware>_<yyyymm>
#   --smoke        in a minute or two, without a GPU too; the numbers mean nothing
#   --only PART    a single part, or a comma-separated list of them
#   --list         names the parts with their limits, and leaves
#
# A call takes eight minutes at most, as each stage does. Each part has a time limit, and begins
# whatever became of the one before. A part that was done is not done again: call it once more with
# the same DIR for what failed, or for which there was no time (rm DIR/done/PART, on every machine,
# to repeat one). DIR gets a log of each part, the records as *.jsonl, report.html of all of them,
# and summary.txt. The exit status is 1 if a part failed. PYTHON names the interpreter; WHEELS names
# a folder of wheels (other engines, a newer NCCL's Python package) that are made importable for the
# benchmarks without being installed. A shardgrad/_C.so that has kernels for this torch is taken as
# it is, and built otherwise.
set -uo pipefail

usage() { sed -n '2,23s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; }

out="" smoke="" stage="" only="" list="" nodes=1 endpoint=""
while (($#)); do
    case $1 in
        --out | --only | --stage | --nnodes | --rdzv-endpoint)
            [[ -n ${2:-} ]] || { usage >&2; exit 2; }
            case $1 in
                --out) out=$2 ;;
                --only) only=,$2, ;;
                --stage) stage=$2 ;;
                --nnodes) nodes=$2 ;;
                --rdzv-endpoint) endpoint=$2 ;;
            esac
            shift
            ;;
        --smoke) smoke=1 ;;
        --list) list=1 ;;
        --help)
            usage
            exit 0
            ;;
        *)
            usage >&2
            exit 2
            ;;
    esac
    shift
done
if ((nodes > 1)) && [[ -z $endpoint ]]; then
    echo "$nodes machines find each other at --rdzv-endpoint HOST:PORT, a port of one of them:" \
        "name it on all" >&2
    exit 2
fi
python=${PYTHON:-python3}
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2

read -r device count gib hardware < <("$python" -c '
import re, torch
found = torch.cuda.is_available()
name = torch.cuda.get_device_name(0) if found else "cpu"
slug = re.sub(r"[^a-z0-9]+", "-", name.lower().replace("nvidia", "")).strip("-")
nbytes = torch.cuda.get_device_properties(0).total_memory if found else 0
ranks = torch.cuda.device_count() if found else 1
print("cuda" if found else "cpu", ranks, nbytes >> 30, slug)') || exit 2
: "${out:=benchmarks/results/gpu_${hardware}_$(date +%Y%m)}"
if [[ -z $list ]]; then
    mkdir -p "$out/done" || exit 2
    out=$(cd "$out" && pwd)
fi

# A graph of replicas of shards is refused without it.
export NCCL_LAUNCH_ORDER_IMPLICIT=${NCCL_LAUNCH_ORDER_IMPLICIT:-1}
readonly TOTAL_S=480
began_s=$SECONDS
failed=0
parts=()

# in_stage N: whether its parts are asked for.
in_stage() { [[ -z $smoke && (-z $stage || $stage == "$1") ]]; }

# part NAME LIMIT_S COMMAND...: runs a command, with what is left of the time at most.
part() {
    local name=$1 limit_s=$2 result=ok start_s=$SECONDS log=$out/$1.log
    shift 2
    if [[ -n $list ]]; then
        printf '%-22s %4d s at most: %s\n' "$name" "$limit_s" "$*"
        return
    fi
    [[ -z $only || $only == *,$name,* ]] || return
    local left_s=$((TOTAL_S - (SECONDS - began_s)))
    ((limit_s > left_s)) && limit_s=$left_s
    ((nodes > 1)) && log=$out/$name.$HOSTNAME.$$.log # the folder may be one for all machines
    if [[ -e $out/done/$name ]]; then
        result="done before"
    elif ((limit_s < 5)); then
        result="no time left"
        failed=1
    else
        # It ends the whole group of processes: benchmarks start ranks, pytest starts workers.
        timeout --kill-after=3 "$limit_s" "$@" >"$log" 2>&1
        case $? in
            0) touch "$out/done/$name" ;;
            124 | 137) result="over its $limit_s s" ;;
            *) result=failed ;;
        esac
        [[ $result == ok ]] || failed=1
    fi
    parts+=("$(printf '%-22s %-16s %4d s' "$name" "$result" $((SECONDS - start_s)))")
    echo "${parts[-1]}"
}

echo "device $device, $count on each of $nodes machines, output in $out"
if [[ -n ${WHEELS:-} && -z $list ]]; then
    "$python" -m pip install --quiet --no-index --no-deps --no-compile --upgrade \
        --target "$out/site" \
        "$WHEELS"/*.whl && export PYTHONPATH="$out/site${PYTHONPATH:+:$PYTHONPATH}"
fi

copies='import torch
x = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
y = torch.empty_like(x)
begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
for _ in range(3):
    begin.record(); y.copy_(x); end.record(); end.synchronize()
rate = 2 * x.numel() / begin.elapsed_time(end) / 1e9
print(torch.cuda.get_device_name(), "copies", rate, "TB/s")'
has_kernels='import torch, shardgrad.ops
has_kernels = torch._C._dispatch_has_kernel_for_dispatch_key("shardgrad::adam_", "CUDA")
assert has_kernels, "no CUDA kernels"'
if [[ $device == cuda && -z $smoke ]]; then
    [[ -n $list ]] || nvidia-smi >"$out/nvidia-smi.txt" 2>&1
    if [[ -z $list ]] && "$python" -c "$has_kernels" 2>/dev/null; then
        echo "shardgrad/_C.so has kernels and is not built again"
    elif command -v nvcc >/dev/null; then
        # One thread for each architecture; the sources are compiled one after the other.
        export NVCC_APPEND_FLAGS="${NVCC_APPEND_FLAGS:-} --threads 0"
        rm -f "$out/done/build" # the record may outlive the checkout
        part build 120 "$python" setup.py build_ext --inplace
    else
        echo "no nvcc: the reference ops are used"
    fi
fi

test=("$python" -m pytest -q -p no:cacheprovider --timeout=30 --durations=5)
kernels=("$python" -m benchmarks kernels --device "$device" --out "$out/kernels")
options=(training_step --device "$device" --timeout 60)
alone=("$python" -m benchmarks "${options[@]}" --ranks 1)
if ((nodes > 1)); then
    all=("$python" -m torch.distributed.run --nnodes "$nodes" --nproc-per-node "$count"
        --rdzv-backend c10d
        --rdzv-endpoint "$endpoint" -m benchmarks "${options[@]}")
else
    all=("$python" -m benchmarks "${options[@]}" --ranks "$count")
fi
bf16=(--precision bf16 --clip 1)
# The same step as a graph of ours, as one without an engine, and as a graph of forward and backward
# only.
graphs=(--engine shardgrad --engine shardgrad-graphed --engine hand-graphed --engine fsdp2-graphed)
# Three engines with a billion parameters are on a device at once: 40 GiB each, or 22 with one row.
long=(--preset 1b --batch-size $((gib >= 120 ? 4 : 1)) --seq-len 2048 --rounds 8 --steps 3)

if [[ -n $smoke ]]; then
    ((nodes > 1)) || part kernels 60 "${kernels[@]}" --smoke
    part steps-tiny 240 "${all[@]}" --smoke --out "$out/steps-tiny" --engine shardgrad \
        --engine shardgrad-graphed
fi
if in_stage 1 && ((nodes == 1)); then
    # Each builds on the one before: what is wrong in an early part explains the later ones.
    part copy 20 "$python" -c "$copies"
    part test-kernels 60 "${test[@]}" tests/gpu/test_gpu_kernels.py tests/gpu/test_gpu_optimizers.py
    part test-random 60 "${test[@]}" tests/gpu/test_gpu_random_programs.py
    part test-captures 60 "${test[@]}" tests/gpu/test_gpu_refusals.py \
        tests/gpu/test_gpu_graphed_step.py
    part test-nccl 40 "${test[@]}" tests/gpu/test_gpu_nccl_alone.py tests/gpu/test_gpu_doctor.py
    part test-upstream 40 "${test[@]}" tests/gpu/test_gpu_upstream_bugs.py
    part test-loops 60 "${test[@]}" tests/gpu/test_gpu_loops.py
    part test-sleep 60 "${test[@]}" tests/gpu/test_gpu_sleep.py
    part test-compile 100 "${test[@]}" tests/gpu/test_gpu_compile.py
    if command -v compute-sanitizer >/dev/null; then
        part memcheck 80 compute-sanitizer --tool memcheck --error-exitcode 1 \
            --target-processes all \
            "${test[@]}" --timeout=75 tests/gpu/test_gpu_kernels.py -k "pack or norm"
    fi
fi
if in_stage 2; then
    if ((nodes * count > 1)); then
        part steps-all-1b 200 "${all[@]}" "${bf16[@]}" "${long[@]}" --engine all --limit-s 150 \
            --out "$out/steps-all-1b"
        # Where latency decides; on several machines also as replicas of shards, one machine each.
        part steps-all-256 100 "${all[@]}" "${bf16[@]}" --preset 1b --batch-size 1 --seq-len 256 \
            --rounds 8 --steps 3 \
            --limit-s 60 --engine ddp "${graphs[@]}" --engine shardgrad-auto --engine collectives \
            --engine shardgrad-windows --out "$out/steps-all-256"
    fi
    if ((nodes > 1 && count > 1)); then
        part steps-replicas 100 "${all[@]}" "${bf16[@]}" "${long[@]}" --mesh "${nodes}x$count" \
            "${graphs[@]}" \
            --engine ddp --limit-s 60 --out "$out/steps-replicas"
    elif ((nodes * count == 1)); then
        # One rank: what an engine costs where nothing is sent, and what a graph takes away. An
        # engine takes ten seconds to start, thirty with a billion parameters, and all are there at
        # once: parts have few.
        part steps-gpt2 150 "${alone[@]}" "${bf16[@]}" --preset gpt2 --batch-size 1 \
            --seq-len 1024 --rounds 20 \
            --steps 8 --limit-s 130 "${graphs[@]}" --out "$out/steps-gpt2"
        part steps-compiled 120 "${alone[@]}" "${bf16[@]}" --preset gpt2 --batch-size 1 \
            --seq-len 1024 --rounds 20 \
            --steps 8 --limit-s 100 --engine shardgrad-compiled --engine fsdp2-compiled \
            --out "$out/steps-compiled"
        part steps-1b 110 "${alone[@]}" "${bf16[@]}" "${long[@]}" --limit-s 100 --engine shardgrad \
            --engine shardgrad-graphed --out "$out/steps-1b"
        part steps-1b-floors 140 "${alone[@]}" "${bf16[@]}" "${long[@]}" --limit-s 130 \
            --engine shardgrad-graphed \
            --engine hand-graphed --out "$out/steps-1b-floors"
        part steps-1b-256 110 "${alone[@]}" "${bf16[@]}" --preset 1b --batch-size 1 --seq-len 256 \
            --rounds 8 --steps 3 \
            --limit-s 100 --engine shardgrad --engine shardgrad-graphed --out "$out/steps-1b-256"
        # In micro-batches, as what fits; fewer engines, since a step takes a second.
        part steps-1b-65536 160 "${alone[@]}" "${bf16[@]}" "${long[@]}" --accumulate 8 --rounds 3 \
            --steps 1 --warmup 5 \
            --limit-s 150 --engine shardgrad --engine shardgrad-graphed --out "$out/steps-1b-65536"
    fi
fi
if in_stage 3 && ((nodes == 1)); then
    part kernels 90 "${kernels[@]}" --rounds 10
    # Tokens of a step: where launches cost most, and where they cost nothing.
    for tokens in 256 4096 65536; do
        rows=$((tokens > 1024 ? tokens / 1024 : 1))
        part "steps-$tokens" 80 "${alone[@]}" "${bf16[@]}" --preset gpt2 --batch-size "$rows" \
            --seq-len $((tokens / rows)) --rounds 10 --steps 3 --limit-s 70 --engine shardgrad \
            --engine shardgrad-graphed --engine hand-graphed --out "$out/steps-$tokens"
    done
    part steps-others 120 "${alone[@]}" "${bf16[@]}" --preset gpt2 --batch-size 1 --seq-len 1024 \
        --rounds 6 --steps 3 \
        --limit-s 100 --engine shardgrad-graphed --engine megatron-fsdp --engine deepspeed-3 \
        --out "$out/steps-others"
    # Two ranks of one device: that losses agree over NCCL, eager and captured. Not a time.
    part steps-shared 90 "$python" -m benchmarks "${options[@]}" --ranks 2 --share-device \
        --preset tiny \
        --engine shardgrad --engine shardgrad-graphed --engine shardgrad-windows --engine ddp \
        --rounds 2 --steps 2 --out "$out/steps-shared"
    # Four of them, as replicas of shards: one graph with collectives of two communicators.
    part steps-shared-mesh 90 "$python" -m benchmarks "${options[@]}" --ranks 4 --mesh 2x2 \
        --share-device --preset tiny \
        --engine shardgrad --engine shardgrad-graphed --rounds 2 --steps 2 \
        --out "$out/steps-shared-mesh"
fi
[[ -z $list ]] || exit 0

mapfile -t records < <(find "$out" -name '*.jsonl' | sort)
{
    if ((${#records[@]})); then
        "$python" -m benchmarks report "${records[@]/#/--record=}" --out "$out"
    fi
    printf '\n%s\n' "parts, $device, $((SECONDS - began_s)) s in all"
    printf '%s\n' "${parts[@]}"
} | tee "$out/summary.txt"
exit "$failed"
