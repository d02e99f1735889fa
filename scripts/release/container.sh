#!/usr/bin/env bash
# Build the image and test it without a GPU; takes a quarter of an hour on two cores.
#
#   scripts/release/container.sh                    # with docker, else with podman
#   IMAGE=unet3d:mine scripts/release/container.sh  # test an existing image
#
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
mkdir "$work/job" "$work/cache" "$work/closed"
chmod a-w "$work/closed"
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

if command -v hadolint >/dev/null; then
    if hadolint "$root/Dockerfile" >"$work/out"; then
        row "hadolint" yes "no warnings"
    else
        row "hadolint" no "$(head -1 "$work/out")"
    fi
fi
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

echo "    running the whole default job"
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
inside python -c '
import os
print("read-only" if os.statvfs("/").f_flag & os.ST_RDONLY else "writable")' >"$work/out"
row "root file system" "$(grep -qx read-only "$work/out" && echo yes || echo no)" \
    "$(cat "$work/out")"

# --- compilation at run time

kernels=$(find "$work/cache" -path '*/cpp/*.so' | wc -l)
row "C++ kernels are compiled and cached" "$([ "$kernels" -gt 0 ] && echo yes || echo no)" \
    "$kernels in /cache"
code=0
# shellcheck disable=SC2016
inside sh -ec '
    folder=$(python -c "from unet3d.kernel_cache import get_triton_cache as get; print(get())")
    mkdir -p "$folder" && cd "$folder"
    cat >stub.c <<END
#include <Python.h>
static struct PyModuleDef stub = {PyModuleDef_HEAD_INIT, "stub"};
PyMODINIT_FUNC PyInit_stub(void) { return PyModule_Create(&stub); }
END
    headers=$(python -c "import sysconfig; print(sysconfig.get_path(\"include\"))")
    gcc -shared -fPIC "-I$headers" stub.c -o stub.so && python -c "import stub"
' &>"$work/out" || code=$?
row "C compiler and Python.h, for Triton" "$([ $code = 0 ] && echo yes || echo no)" \
    "exit code $code $(tail -1 "$work/out")"
code=0
inside python -c '
import torch
x = torch.ones(8)
assert torch.compile(lambda x: x.sin() + 1)(x).allclose(x.sin() + 1)' &>"$work/out" || code=$?
row "torch.compile" "$([ $code = 0 ] && echo yes || echo no)" \
    "exit code $code $(tail -1 "$work/out")"
train_short "default job, /cache mounted noexec" \
    --read-only --tmpfs /cache:rw,noexec,nosuid,nodev,mode=1777 --
if grep -q "is mounted noexec" "$work/out"; then
    row "a noexec cache is reported" yes "$(first_match "$work/out" "/cache/unet3d is")"
else
    row "a noexec cache is reported" no "$(tail -1 "$work/out")"
fi

# --- missing resources

code=0
run "${locked[@]}" -v "$work/closed:/cache" "$image" train "${short_run[@]}" &>"$work/out" ||
    code=$?
row "a read-only /cache is reported, with exit code 2" \
    "$([ $code = 2 ] && grep -q '^unet3d: .*/cache/' "$work/out" && echo yes || echo no)" \
    "exit code $code: $(tail -1 "$work/out")"
code=0
run --shm-size=1m "$image" train "${short_run[@]}" data.num_workers=2 &>"$work/out" || code=$?
row "a small /dev/shm is reported at start, with exit code 2" \
    "$([ $code = 2 ] && grep -q -- --shm-size= "$work/out" && echo yes || echo no)" \
    "exit code $code: $(first_match "$work/out" "/dev/shm")"

# --- docker stop

check_stop() { # CHECK NAME READY WORD...: stop a run as soon as the command READY succeeds
    local check=$1 name=$2 ready=$3 code=0 before steps after
    shift 3
    run --name "$name" "${cluster_node[@]}" "$image" train "hydra.run.dir=outputs/$name" \
        resume=auto save_every_seconds=0 trainer.enable_progress_bar=false "$@" \
        &>"$work/$name.txt" &
    wait_for 120 eval "$ready"
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

is_running() { "$engine" container inspect --format '{{.State.Status}}' "$1" | grep -qx running; }
check_stop "SIGTERM at start" "unet3d-early" "is_running unet3d-early"
has_saved() { test -e "$work/job/outputs/$1/checkpoints/previous.ckpt"; } # of the second step
check_stop "SIGTERM in training" "unet3d-one" "has_saved unet3d-one"
check_stop "SIGTERM with two ranks" "unet3d-two" "has_saved unet3d-two" \
    trainer.devices=2 trainer.accelerator=cpu

# --- layers

cat >"$work/layers.py" <<'END'
"""Measure layers, and find files that none should have: a later layer cannot remove them."""
import io
import json
import re
import sys
import tarfile

CACHE = re.compile(r"(^|/)(\.cache|pip/(http[^/]*|wheels|selfcheck))/")
SECRET = re.compile(
    r"(^|/)(\.netrc|\.pypirc|\.git-credentials|\.env|pip\.conf|\.git|\.aws|\.ssh|\.kube|\.docker"
    r"|id_(rsa|dsa|ecdsa|ed25519))(/|$)"
)
texts, sizes, unwanted = {}, {}, {"cache": [], "secret": []}


def inspect(name, layer):
    """Record a layer's size and unwanted files."""
    sizes[name] = 0
    for entry in layer:
        sizes[name] += entry.size
        if not entry.isfile() or entry.size == 0:
            continue
        if CACHE.search(entry.name):
            unwanted["cache"].append(entry.name)
        content = b""
        if entry.name.endswith((".pem", ".key")):
            content = layer.extractfile(entry).read()
        if SECRET.search(entry.name) or b"PRIVATE KEY" in content:
            unwanted["secret"].append(entry.name)


with tarfile.open(fileobj=sys.stdin.buffer, mode="r|") as image:
    for member in image:
        if not member.isfile():
            continue
        file = image.extractfile(member)
        if member.size < 1 << 18:  # metadata, or a small layer
            texts[member.name] = file.read()
            file = io.BytesIO(texts[member.name])
        try:
            with tarfile.open(fileobj=file, mode="r|*") as layer:
                inspect(member.name, layer)
        except tarfile.ReadError:
            if member.name not in texts:
                raise
manifest = json.loads(texts["manifest.json"])[0]
history = [h for h in json.loads(texts[manifest["Config"]])["history"] if not h.get("empty_layer")]
MARKS = {"compilers": "apt-get install", "torch": '"${TORCH}"', "packages": "/wheels/*.whl"}
MARKS |= {"unet3d": "/project"}
layers = dict.fromkeys(["base", *MARKS], 0)
for name, step in zip(manifest["Layers"], history, strict=True):
    command = step.get("created_by", "")
    kind = next((kind for kind, mark in MARKS.items() if mark in command), "base")
    layers[kind] += sizes.get(name, 0)
print(json.dumps({"layers_mib": {k: round(v / 2**20) for k, v in layers.items()}, **unwanted}))
END
"$engine" save "$image" | python3 "$work/layers.py" >"$work/layers.json"
for kind in cache secret; do
    found=$(python3 -c "import json, sys; print(*json.load(sys.stdin)['$kind'][:3])" \
        <"$work/layers.json")
    row "no $([ $kind = cache ] && echo "pip cache" || echo "secret file") in any layer" \
        "$([ -z "$found" ] && echo yes || echo no)" "${found:-none}"
done
found=$({
    "$engine" history --no-trunc --format '{{.CreatedBy}}' "$image"
    "$engine" image inspect --format '{{json .Config.Env}} {{json .Config.Labels}}' "$image"
} | grep -oiE '[a-z_]*(token|secret|passw|credential|api_?key|access_?key)[a-z_]*=|//[^/ ]+:[^/ ]+@' |
    sort -u | tr '\n' ' ' || true)
row "no secret in history or environment" "$([ -z "$found" ] && echo yes || echo no)" \
    "${found:-none}"

cat "$work/layers.json"
bad=$(awk -F '\t' '$2 != "yes" {print $1}' "$work/rows.tsv")
[ -z "$bad" ] || { echo "failed: $bad" >&2 && exit 1; }
