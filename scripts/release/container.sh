#!/usr/bin/env bash
# Build the image and test it without a GPU; takes a quarter of an hour on two cores.
#
#   scripts/release/container.sh                    # with docker, else with podman
#   IMAGE=unet3d:mine scripts/release/container.sh  # test an existing image
# BUILD_FLAGS and RUN_FLAGS are passed on: BUILD_FLAGS="--build-arg BASE=python:3.12-slim".
# Prints each check; the exit code is 1 if one fails.
set -euo pipefail
shopt -s inherit_errexit

root=$(cd "$(dirname "$0")/../.." && pwd)
work=$(mktemp -d /tmp/container.XXXXXX)
engine=${ENGINE:-docker}
[ -n "${ENGINE:-}" ] || docker info >/dev/null 2>&1 || engine=podman
image=${IMAGE:-unet3d:check}
read -ra build_flags <<<"${BUILD_FLAGS:-}"
read -ra run_flags <<<"${RUN_FLAGS:-}"
caller=$(id -u):$(id -g)
[ "$(id -u)" != 0 ] || caller=4242:4343 # a user that the image does not have
mkdir "$work/job" "$work/cache"
chown "$caller" "$work/job" "$work/cache"
trap 'rm -rf "$work"' EXIT

locked=(--read-only --tmpfs "/tmp:rw,noexec,nosuid,nodev" --network none --user "$caller")
cluster_node=("${locked[@]}" -v "$work/job:/job" -v "$work/cache:/cache")
short_run=(trainer.max_steps=3 trainer.enable_progress_bar=false evaluation.enabled=false)

run() { "$engine" run --rm ${run_flags[@]+"${run_flags[@]}"} "$@"; } # FLAG... IMAGE WORD...
inside() { run "${cluster_node[@]}" --entrypoint "$1" "$image" "${@:2}"; } # COMMAND WORD...

row() { # CHECK yes|no FOUND
    printf '%s\t%s\t%s\n' "$1" "$2" "$3" >>"$work/rows.tsv"
    printf '%-4s%-54s%s\n' "$2" "$1" "$3"
}

first_match() { # FILE PATTERN: print the first line that matches, from the match on
    grep -aoE "$2.*" "$1" | head -1 | tr '\t' ' ' || true
}

train_short() { # CHECK FLAG... -- WORD...: check that a short run prints its results
    local check=$1 flags=() code=0
    shift
    while [ "$1" != -- ]; do flags+=("$1") && shift; done
    run ${flags[@]+"${flags[@]}"} "$image" train "${short_run[@]}" "${@:2}" &>"$work/out" || code=$?
    if [ $code = 0 ] && grep -q "step time" "$work/out"; then
        row "$check" yes "exit code 0"
    else
        row "$check" no "exit code $code: $(tail -1 "$work/out")"
    fi
}

wait_for() { # SECONDS COMMAND...: repeat a command until it succeeds
    local last=$((SECONDS + $1))
    shift
    until "$@" >/dev/null 2>&1; do
        [ $SECONDS -lt $last ] || { echo "timed out waiting for: $*" >&2 && return 1; }
        sleep 0.2
    done
}

# --- the image

if [ -z "${IMAGE:-}" ]; then
    echo "    building the image; progress is in $work/build.txt"
    "$engine" build ${build_flags[@]+"${build_flags[@]}"} -t "$image" "$root" &>"$work/build.txt" ||
        { tail -20 "$work/build.txt" && exit 1; }
fi
system=$(inside python -c '
import platform, torch
print(platform.freedesktop_os_release()["PRETTY_NAME"], end=", ")
print("Python", platform.python_version(), end=", ")
print("torch", torch.__version__)')
row "build" yes "$system"

# --- users and mounts

user=$("$engine" image inspect --format '{{.Config.User}}' "$image")
row "the user is not root" "$([[ ${user:-0} =~ ^[1-9] ]] && echo yes || echo no)" "${user:-root}"
run "$image" --help >"$work/out"
row "unet3d --help" "$(grep -q 'usage: unet3d' "$work/out" && echo yes || echo no)" \
    "$(first_match "$work/out" "usage")"

train_short "default job, nothing mounted" --
train_short "default job, nothing mounted, root read-only" --read-only --network none --

code=0
run "${cluster_node[@]}" "$image" train hydra.run.dir=outputs/full \
    trainer.enable_progress_bar=false &>"$work/out" || code=$?
dice=$(first_match "$work/out" "Dice, mean")
row "whole default job, root read-only, uid $caller" \
    "$([ $code = 0 ] && [ -n "$dice" ] && echo yes || echo no)" "exit code $code: ${dice//  /}"
others=$(find "$work/job" "$work/cache" -mindepth 1 -printf '%U:%G\n' | grep -vcx "$caller" || true)
count=$(find "$work/job" "$work/cache" -type f | wc -l)
row "all files belong to the caller" \
    "$([ "$others" = 0 ] && [ -e "$work/job/outputs/full/report.json" ] && echo yes || echo no)" \
    "$count files, of other users: $others"
code=0
run "${cluster_node[@]}" "$image" export checkpoint=outputs/full output=net.onnx &>"$work/out" ||
    code=$?
row "export to ONNX" "$([ $code = 0 ] && [ -s "$work/job/net.onnx" ] && echo yes || echo no)" \
    "exit code $code: $(tail -1 "$work/out")"

# --- compilation at run time

kernels=$(find "$work/cache" -path '*/cpp/*.so' | wc -l)
row "C++ kernels are compiled and cached" "$([ "$kernels" -gt 0 ] && echo yes || echo no)" \
    "$kernels in /cache"

# --- docker stop

check_stop() { # CHECK NAME WORD...: stop a run once it has saved a checkpoint, and resume it
    local check=$1 name=$2 code=0 before steps after
    shift 2
    run --name "$name" "${cluster_node[@]}" "$image" train "hydra.run.dir=outputs/$name" \
        resume=auto save_every_seconds=0 trainer.enable_progress_bar=false "$@" \
        &>"$work/$name.txt" &
    wait_for 120 test -e "$work/job/outputs/$name/checkpoints/last.ckpt"
    before=$SECONDS
    "$engine" stop --time 100 "$name" >/dev/null
    wait $! || code=$?
    steps=$(first_match "$work/$name.txt" "after [0-9]+ steps" | grep -oE '[0-9]+' | head -1 ||
        true)
    row "$check" "$([ $code = 143 ] && [ $((SECONDS - before)) -lt 60 ] && echo yes || echo no)" \
        "exit code $code${steps:+ after $steps steps}"
    [ -n "$steps" ] || return 0
    code=0
    run "${cluster_node[@]}" "$image" train "hydra.run.dir=outputs/$name" resume=auto "$@" \
        "trainer.max_steps=$((steps + 2))" "${short_run[@]:1}" &>"$work/out" || code=$?
    after=$(python3 -c "import json, sys; print(json.load(sys.stdin)['steps'])" \
        <"$work/job/outputs/$name/report.json")
    row "$check: resume=auto" "$([ "$code $after" = "0 $((steps + 2))" ] &&
        grep -qE "resum(es|ing) from" "$work/out" && echo yes || echo no)" \
        "exit code $code after $after steps"
}

check_stop "SIGTERM in training" unet3d-one
check_stop "SIGTERM with two ranks" unet3d-two trainer.devices=2 trainer.accelerator=cpu

bad=$(awk -F '\t' '$2 != "yes" {print $1}' "$work/rows.tsv")
[ -z "$bad" ] || { echo "failed: $bad" >&2 && exit 1; }
