#!/usr/bin/env bash
# Everything that wants a GPU, in less than nine minutes: build, tests, benchmarks, and a table last.
#
#   bash benchmarks/gpu.sh                       into benchmarks/results/gpu_<hardware>_<yyyymm>
#   bash benchmarks/gpu.sh --out DIR             into DIR
#   bash benchmarks/gpu.sh --out DIR --smoke     in a minute or two, without a GPU too; the numbers mean nothing
#   bash benchmarks/gpu.sh --out DIR --only PART a single part, or a comma-separated list of them
#   bash benchmarks/gpu.sh --list                names the parts, and leaves
#
# Each part has a time limit, and begins whatever became of the one before. A part that was done is not done
# again: call it once more with the same DIR for what failed, or for which there was no time (rm DIR/done/PART
# to repeat one). DIR gets a log of each part, the records as *.jsonl, report.html, and summary.txt. The exit
# status is 1 if a part failed. PYTHON names the interpreter; WHEELS names a folder of wheels (other engines, a
# newer NCCL's Python package) that are made importable for the benchmarks without being installed.
set -uo pipefail

usage() { sed -n '2,16s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; }

out=""
smoke=""
only=""
list=""
while (($#)); do
    case $1 in
        --out | --only)
            [[ -n ${2:-} ]] || { usage >&2; exit 2; }
            if [[ $1 == --out ]]; then out=$2; else only=,$2,; fi
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
python=${PYTHON:-python3}
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2

read -r device count hardware < <("$python" -c '
import re, torch
found = torch.cuda.is_available()
name = torch.cuda.get_device_name(0) if found else "cpu"
slug = re.sub(r"[^a-z0-9]+", "-", name.lower().replace("nvidia", "")).strip("-")
print("cuda" if found else "cpu", torch.cuda.device_count() if found else 0, slug)') || exit 2
: "${out:=benchmarks/results/gpu_${hardware}_$(date +%Y%m)}"
if [[ -z $list ]]; then
    mkdir -p "$out/done" || exit 2
    out=$(cd "$out" && pwd)
fi

readonly TOTAL_S=530
began_s=$SECONDS
failed=0
parts=()

# part NAME LIMIT_S COMMAND...: runs a command, with what is left of the time at most.
part() {
    local name=$1 limit_s=$2 result=ok start_s=$SECONDS
    shift 2
    if [[ -n $list ]]; then
        printf '%-22s %4d s at most: %s\n' "$name" "$limit_s" "$*"
        return
    fi
    [[ -z $only || $only == *,$name,* ]] || return
    local left_s=$((TOTAL_S - (SECONDS - began_s)))
    ((limit_s > left_s)) && limit_s=$left_s
    if [[ -e $out/done/$name ]]; then
        result="done before"
    elif ((limit_s < 5)); then
        result="no time left"
        failed=1
    else
        # It ends the whole group of processes: benchmarks start ranks, pytest starts workers.
        timeout --kill-after=3 "$limit_s" "$@" >"$out/$name.log" 2>&1
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

echo "device $device, output in $out"
if [[ -n ${WHEELS:-} && -z $list ]]; then
    "$python" -m pip install --quiet --no-index --no-deps --no-compile --upgrade --target "$out/site" \
        "$WHEELS"/*.whl && export PYTHONPATH="$out/site${PYTHONPATH:+:$PYTHONPATH}"
fi

if [[ $device == cuda ]]; then
    [[ -n $list ]] || nvidia-smi >"$out/nvidia-smi.txt" 2>&1
    if command -v nvcc >/dev/null; then
        # One thread for each architecture; the sources are compiled one after the other.
        export NVCC_APPEND_FLAGS="${NVCC_APPEND_FLAGS:-} --threads 0"
        # Also where it was done before: the record may outlive the checkout.
        [[ -e shardgrad/_C.so ]] || rm -f "$out/done/build"
        part build 120 "$python" setup.py build_ext --inplace
        part compiled-ops 30 "$python" -c 'import torch, shardgrad.ops
assert torch._C._dispatch_has_kernel_for_dispatch_key("shardgrad::adam_", "CUDA"), "no CUDA kernels"'
    else
        echo "no nvcc: the reference ops are used"
    fi
fi

test=("$python" -m pytest -q -p no:cacheprovider --timeout=60)
steps=("$python" -m benchmarks training_step --device "$device" --timeout 60)
kernels=("$python" -m benchmarks kernels --device "$device" --out "$out")
optimizers=("$python" -m benchmarks optimizers --device "$device" --out "$out")
replay=("$python" -m benchmarks graphed_replay --device "$device" --out "$out")
alone=("${steps[@]}" --ranks 1 --precision bf16 --clip 1)
if [[ -n $smoke ]]; then
    part tests 120 "${test[@]}" tests/gpu/test_gpu_graphed_step.py
    part steps-tiny 120 "${steps[@]}" --smoke --out "$out/steps-tiny" --engine shardgrad --engine shardgrad-graphed \
        --engine compute
    part kernels 60 "${kernels[@]}" --smoke
    part optimizers 60 "${optimizers[@]}" --smoke --case one_unit
    part graphed_replay 60 "${replay[@]}" --smoke
else
    part tests 110 "${test[@]}" tests/gpu
    # One rank: what an engine costs where nothing is sent, and what a graph takes away.
    part steps-gpt2 170 "${alone[@]}" --preset gpt2 --batch-size 1 --seq-len 1024 --engine all --rounds 20 \
        --limit-s 120 --out "$out/steps-gpt2"
    # The same step as a graph of ours, as one without an engine, and as a graph of forward and backward only.
    graphs=(--engine shardgrad --engine shardgrad-graphed --engine hand-graphed --engine fsdp2-graphed)
    part steps-300m 120 "${alone[@]}" --preset 300m --batch-size 4 --seq-len 1024 --rounds 12 --limit-s 90 \
        "${graphs[@]}" --engine fsdp2-compiled --engine ddp --out "$out/steps-300m"
    part steps-1b 150 "${alone[@]}" --preset 1b --batch-size 4 --seq-len 2048 --rounds 8 --steps 3 --limit-s 100 \
        "${graphs[@]}" --engine compute --out "$out/steps-1b"
    part kernels 25 "${kernels[@]}" --ops segments --rounds 10
    part optimizers 40 "${optimizers[@]}"
    part graphed_replay 30 "${replay[@]}"
    if ((count > 1)); then
        part steps-ranks 200 "${steps[@]}" --ranks "$count" --precision bf16 --clip 1 --preset 1b --batch-size 2 \
            --seq-len 2048 --engine all --rounds 10 --steps 3 --limit-s 150 --out "$out/steps-ranks"
    else
        # Two ranks of one device: that losses agree over NCCL, eager and captured. Not a time.
        part steps-shared 90 "${steps[@]}" --ranks 2 --share-device --preset tiny --engine shardgrad \
            --engine shardgrad-graphed --engine ddp --rounds 2 --steps 2 --out "$out/steps-shared"
    fi
fi
[[ -z $list ]] || exit 0

{
    for log in "$out"/steps-*.log; do
        [[ -e $log ]] && cat "$log"
    done
    printf '\n%s\n' "parts, $device, $((SECONDS - began_s)) s in all"
    printf '%s\n' "${parts[@]}"
} | tee "$out/summary.txt"
exit "$failed"
