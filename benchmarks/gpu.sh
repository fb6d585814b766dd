#!/usr/bin/env bash
# Everything that wants a GPU, in less than nine minutes: build, tests, benchmarks, and a table last.
#
#   bash benchmarks/gpu.sh --out DIR             on a machine with one GPU
#   bash benchmarks/gpu.sh --out DIR --smoke     in a minute or two, without a GPU too; the numbers mean nothing
#
# Each part has a time limit, and begins whatever became of the one before. DIR gets a log of each part, the
# records as *.jsonl, and summary.txt. The exit status is 1 if a part failed. PYTHON names the interpreter.
set -uo pipefail

usage() { sed -n '2,8s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; }

out=""
smoke=""
while (($#)); do
    case $1 in
        --out)
            out=${2:-}
            shift
            ;;
        --smoke) smoke=1 ;;
        --help)
            usage
            exit 0
            ;;
        *)
            usage >&2
            exit 2
            ;;
    esac
    (($#)) && shift
done
if [[ -z $out ]]; then
    usage >&2
    exit 2
fi
mkdir -p "$out" || exit 2
out=$(cd "$out" && pwd)
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2

python=${PYTHON:-python3}
readonly TOTAL_S=530
began_s=$SECONDS
failed=0
parts=()

# part NAME LIMIT_S COMMAND...: runs a command, with what is left of the time at most.
part() {
    local name=$1 limit_s=$2 result=ok start_s=$SECONDS
    shift 2
    local left_s=$((TOTAL_S - (SECONDS - began_s)))
    ((limit_s > left_s)) && limit_s=$left_s
    if ((limit_s < 5)); then
        result="no time left"
    else
        # It ends the whole group of processes: benchmarks start ranks, pytest starts workers.
        timeout --kill-after=3 "$limit_s" "$@" >"$out/$name.log" 2>&1
        case $? in
            0) ;;
            124 | 137) result="over its $limit_s s" ;;
            *) result=failed ;;
        esac
    fi
    [[ $result == ok ]] || failed=1
    parts+=("$(printf '%-22s %-16s %4d s' "$name" "$result" $((SECONDS - start_s)))")
    echo "${parts[-1]}"
}

device=$("$python" -c 'import torch; print("cuda" if torch.cuda.is_available() else "cpu")') || exit 2
echo "device $device, output in $out"

if [[ $device == cuda ]]; then
    nvidia-smi >"$out/nvidia-smi.txt" 2>&1
    if command -v nvcc >/dev/null; then
        # One thread for each architecture; the sources are compiled one after the other.
        export NVCC_APPEND_FLAGS="${NVCC_APPEND_FLAGS:-} --threads 0"
        part build 120 "$python" setup.py build_ext --inplace
        part compiled-ops 30 "$python" -c 'import torch, shardgrad.ops
assert torch._C._dispatch_has_kernel_for_dispatch_key("shardgrad::adam_", "CUDA"), "no CUDA kernels"'
    else
        echo "no nvcc: the reference ops are used"
    fi
fi

test=("$python" -m pytest -q -p no:cacheprovider --timeout=60)
graphed=("$python" -m benchmarks.graphed --device "$device" --out "$out")
kernels=("$python" -m benchmarks.kernels --device "$device" --out "$out")
optimizer=("$python" -m benchmarks.optimizer --device "$device" --out "$out")
if [[ -n $smoke ]]; then
    part tests 120 "${test[@]}" tests/gpu/test_graphed_step.py
    part graphed-tiny 120 "${graphed[@]}" --smoke
    part kernels 60 "${kernels[@]}" --smoke
    part optimizer 60 "${optimizer[@]}" --smoke --case one_unit
else
    part tests 110 "${test[@]}" tests/gpu
    part graphed-gpt2-1024 100 "${graphed[@]}" --preset gpt2 --tokens 1024 --limit-s 80
    part graphed-300m-4096 90 "${graphed[@]}" --preset 300m --tokens 4096 --rounds 12 --steps 5 --limit-s 70
    part graphed-1b-8192 100 "${graphed[@]}" --preset 1b --tokens 8192 --rounds 8 --steps 3 --limit-s 75
    part kernels 25 "${kernels[@]}" --ops segments --rounds 10
    part optimizer 40 "${optimizer[@]}"
fi

{
    for log in "$out"/graphed-*.log; do
        cat "$log"
    done
    printf '\n%s\n' "parts, $device, $((SECONDS - began_s)) s in all"
    printf '%s\n' "${parts[@]}"
} | tee "$out/summary.txt"
exit "$failed"
