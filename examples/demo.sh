#!/usr/bin/env bash
# The forum thread's case on vLLM's real engine, on a CPU: 4 and 16 prompts of 1,024 + 64 tokens, a budget of
# 16,384, 8 trials each; once as vLLM runs by default and once with everything queued before the first step.
# Usage: examples/demo.sh [FOLDER]   (default: demo)
set -euo pipefail
cd "$(dirname "$0")/.."
logs=${1:-demo}

cat <<'INTRO'
A vLLM user asked in the forum (July 2025): 4 or 16 prompts of 1,024 tokens fit the token budget of 16,384, and yet
the first scheduling step holds only some of them, differently every time. 1. Why? 2. Is it a bug?
This records that case with vLLM's real engine on this machine's CPU (a tiny model, random weights; scheduling depends on
token counts only), four runs of 8 trials, and lets the traces answer. About a minute and a half.
INTRO

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
