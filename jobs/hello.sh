#!/bin/sh
# The first thing to try where the image has no Python: each process says who it is. `hello.sh WORD ...` prints the words too.
#     runner launch --env ENV --script hello.sh
set -eu
node=${SLURMD_NODENAME:-$(uname -n)}
echo "hello from rank ${RANK:-${SLURM_PROCID:-0}} of ${WORLD_SIZE:-${SLURM_NTASKS:-1}} on $node, $(uname -s) $(uname -m)"
echo "run ${RUNNER_RUN:-(none)}, attempt ${RUNNER_ATTEMPT:-(none)}"
for word in "$@"; do
    printf 'word %s\n' "$word"
done
