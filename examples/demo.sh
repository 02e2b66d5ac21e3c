#!/usr/bin/env bash
# The forum thread's case on vLLM's real engine, on a CPU: 4 and 16 prompts of 1,024 + 64 tokens, a budget of
# 16,384, 8 trials each; once as vLLM runs by default and once with everything queued before the first step.
# Usage: examples/demo.sh [FOLDER]   (default: demo)
set -euo pipefail
cd "$(dirname "$0")/.."
logs=${1:-demo}

record() {  # record LABEL NUM_PROMPTS [OPTION...]
    local label=$1 prompts=$2
    shift 2
    printf '\n== recording %s: %s prompts, 8 trials %s\n' "$label" "$prompts" "$*"
    schedtrace run --model examples/tiny-qwen3 --load-format dummy --max-num-batched-tokens 16384 \
        --input-len 1024 --output-len 64 --num-prompts "$prompts" --warmup "$prompts" --trials 8 \
        --output "$logs" --label "$label" --force "$@"
}

record default-4 4
record default-16 16
record prequeue-4 4 --prequeue
record prequeue-16 16 --prequeue

printf '\n== schedtrace analyze %s/default-16\n' "$logs"
schedtrace analyze "$logs/default-16"
printf '\n== schedtrace diff %s/default-4 %s/prequeue-4\n' "$logs" "$logs"
schedtrace diff "$logs/default-4" "$logs/prequeue-4"
printf '\n== schedtrace diff %s/default-16 %s/prequeue-16\n' "$logs" "$logs"
schedtrace diff "$logs/default-16" "$logs/prequeue-16"
printf '\n== the two questions of the thread, answered from these runs\n'
python examples/thread_answer.py "$logs"/default-4 "$logs"/default-16 --prequeued "$logs"/prequeue-4 "$logs"/prequeue-16
