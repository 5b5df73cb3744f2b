#!/bin/sh
# Stands in for a program that a batch script calls: writes down the call, prints nothing, ends with a chosen code.
# In a sandbox, /usr/local/bin has this file under each program's name.
name=${0##*/}
case $name in
sleep)
    case ${1%[smhd]} in
    infinity | inf | ??????*) exec /usr/bin/sleep "$@" ;;
    esac
    exec /usr/bin/sleep 0.05
    ;;
cp | tar | unzip) # a failure, mostly of a missing data set, is recorded and is not one
    "/usr/bin/$name" "$@" 2>/dev/null && exit
    ;;
scontrol)
    case " $* " in
    *" requeue"* | *" update "* | *" hold "* | *" release "*) ;;
    *) exec /usr/bin/scontrol "$@" ;;
    esac
    ;;
squeue)
    case " $* " in *" --format=%V %S "*) exit 0 ;; esac # runner's own call at the start of an attempt (payload/attempt.sh)
    ;;
esac
if [ -z "${SLURM_JOB_ID:-}" ] && [ -x "/usr/bin/$name" ]; then # the submission itself
    exec "/usr/bin/$name" "$@"
fi
streams=$(for number in 0 1 2; do /usr/bin/readlink "/proc/$$/fd/$number"; done)
call=$(/usr/bin/mktemp -d "/records/$(/usr/bin/date +%s%N).XXXXXX")
/usr/bin/printf '%s\0' "$name" "$@" >"$call/words"
/usr/bin/readlink /proc/self/cwd >"$call/folder"
/usr/bin/cat /proc/$$/environ >"$call/environ"
/usr/bin/cat "/proc/$PPID/cmdline" >"$call/parent"
{
    /usr/bin/printf '%s\n' "$streams" "umask $(umask)"
    /usr/bin/grep -E '^Sig(Blk|Ign)' /proc/self/status
    # shellcheck disable=SC3045 # dash and bash have it
    ulimit -a
} >"$call/process"
: >"$call/done"
case $name in
module | ml | conda | mamba | micromamba | nvidia-smi | rocm-smi | pip | pip3 | git | cp | tar | unzip | spack | squeue | sinfo | sacct) exit 0 ;;
esac
read -r code </records/.code
exit "${code:-0}"
