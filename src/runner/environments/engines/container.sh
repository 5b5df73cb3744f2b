#!/usr/bin/env bash
# shellcheck disable=SC1091,SC2016,SC2034,SC2154  # two files are sourced; quoted references are for the shell inside
# Runs a command in a container of podman or docker. Usage: bash container.sh COMMAND…
# container.conf beside this file describes the container. The image is a squashfs file (only with podman, as --rootfs),
# or comes from the engine's storage or a registry.
set -euo pipefail
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)
source "$here/environment.sh"
engine='' image='' workdir='' entrypoint='' writable='' mounts=() env=() devices=() gpus='' own_tmp=''
source "$here/container.conf"
node=${SLURMD_NODENAME:-$(uname -n)}
flags=(run --rm --interactive --network host --uts host) within=()
# DeepSpeed and NCCL need the node's /dev/shm; rootless podman rejects `--ipc host` if /dev/mqueue does not exist
if [[ -d /dev/mqueue ]]; then flags+=(--ipc host); else flags+=(--volume /dev/shm:/dev/shm); fi

command -v "$engine" > /dev/null || fail "$engine is missing on $node" "this run uses the engine $engine" \
  "ask an admin to install it, or use another engine: --engine NAME"

if [[ $engine == podman ]]; then
  flags+=(--security-opt label=disable)
  # podman's default limits are higher than root may set without CAP_SYS_RESOURCE
  processes=$(ulimit -Hu)
  if [[ $processes == unlimited ]] || ((processes > 32768)); then processes=32768; fi
  flags+=(--ulimit "nofile=$(ulimit -Sn):$(ulimit -Hn)" --ulimit "nproc=$processes:$processes")
  # crun does not support hosts that mix cgroups v1 and v2
  if [[ -n $(cat /sys/fs/cgroup/unified/cgroup.controllers 2> /dev/null) ]] && command -v runc > /dev/null; then
    flags=(--runtime runc --cgroup-manager cgroupfs --events-backend file "${flags[@]}")
  fi
fi

# Fills `flags` with mounts, devices and the root file system's mode.
describe() {
  local index source target options device
  for ((index = 0; index < ${#mounts[@]}; index += 3)); do
    expand host "${mounts[index]}" "mounts.$((index / 3))"
    absolute "$REPLY"
    source=$REPLY
    expand host "${mounts[index + 1]}" "mounts.$((index / 3))"
    target=$REPLY options=rw
    [[ +${mounts[index + 2]}+ == *+ro+* ]] && options=ro
    [[ $source$target != *[:,]* ]] || fail "$engine cannot mount $source at $target" \
      "its option --volume separates fields with colons and commas, and $source or $target contains one" "rename the folder"
    [[ -e $source ]] || fail "the mount source $source does not exist on $node" \
      "mounts.$((index / 3)) mounts $source at $target" "create $source, correct the path, or remove the mount from the EDF"
    flags+=(--volume "$source:$target:$options")
    [[ $target != /tmp ]] || own_tmp=1
  done
  for device in ${devices[@]+"${devices[@]}"}; do
    expand host "$device" devices
    flags+=(--device "$REPLY")
  done
  [[ ! -t 0 || ! -t 1 ]] || flags+=(--tty)
  if [[ -n $gpus && $engine == docker ]]; then flags+=(--gpus all); fi
  if [[ -n $gpus && $engine == podman ]]; then flags+=(--device nvidia.com/gpu=all); fi
}

# Adds the variables to `flags`: only the name if the container gets the host's value. The array `within` is a call of env
# before the command, for what the engine's options cannot express: unset variables, and values with carriage returns,
# which podman 4.3 drops from --env.
hand_in() {
  local name value
  for name in "${!dropped[@]}"; do within+=(-u "$name"); done
  for name in "${!inside[@]}"; do
    value=${inside[$name]}
    if [[ -n ${dropped[$name]-} || $name == PATH ]]; then
      continue
    elif [[ $value == *$'\r'* ]]; then
      within+=("$name=$value")
    elif [[ $name != HOME && ${host[$name]+set} == set && ${host[$name]} == "$value" ]]; then
      flags+=(--env "$name")
    else
      flags+=(--env "$name=$value")
    fi
  done
  # the image's PATH must find env itself
  if ((${#within[@]} > 0)); then
    within=(env "${within[@]}" "PATH=${inside[PATH]}")
  else
    flags+=(--env "PATH=${inside[PATH]}")
  fi
}

enter_image() {
  local image_env
  expand host "$image" image
  image=${REPLY/'#'//} # enroot's REGISTRY#IMAGE becomes REGISTRY/IMAGE
  "$engine" image inspect "$image" > /dev/null 2>&1 || "$engine" pull "$image" >&2 ||
    fail "there is no image $image for $engine on $node" "its storage does not have it, and it could not be pulled; see the message above" \
      "build it on that node, log in to its registry ($engine login), or write the name of the registry"
  image_env=$(mktemp)
  trap 'rm -f "$image_env"' EXIT
  "$engine" image inspect --format '{{range .Config.Env}}{{println .}}{{end}}' "$image" > "$image_env"
  read_image "$image_env"
  rm -f "$image_env"
  read_edf
  describe
  hand_in
  [[ -n $entrypoint ]] || flags+=(--entrypoint '')
  if [[ -n $workdir ]]; then
    flags+=(--workdir "$workdir")
  fi
  [[ -n $writable ]] || flags+=(--read-only)
  # with a read-only root, podman itself provides a writable /tmp
  [[ -n $writable || $engine == podman || -n $own_tmp ]] || flags+=(--tmpfs "/tmp:exec,mode=1777")
  exec "$engine" "${flags[@]}" "$image" ${within[@]+"${within[@]}"} "$@"
}

# Runs the squashfs file as podman's root file system, with podman's own overlay over it (`:O`). This runs as root, or in
# `podman unshare`, in a mount namespace that only this task uses.
enter_squashfs() {
  local root=$1 said=$2 command=() index
  shift 2
  [[ -z $said ]] || printf '%s\n' "$$" > "$said"
  expand host "$image" image
  absolute "$REPLY"
  image=$REPLY
  [[ -f $image ]] || fail "there is no image $image on $node" "the file does not exist, or this user cannot read its folder" \
    "runner import NAME, into a folder that every node sees"
  command -v squashfuse > /dev/null || fail "squashfuse is missing on $node" "podman needs it to mount squashfs files" \
    "ask an admin to install squashfuse, or use another engine: --engine NAME"
  mount -t tmpfs -o mode=0755 tmpfs "$root"
  mkdir "$root/lower"
  # in the foreground, and killed when this script dies, so that it never outlives this task
  { deaf && exec setpriv --pdeathsig KILL squashfuse -f "$image" "$root/lower"; } &
  trap 'code=$?; kill -KILL %1 2> /dev/null || true; [[ -z $said ]] || printf "%s\n" "$code" >> "$said"' EXIT
  trap : HUP INT TERM USR1 USR2 # the engine gets these signals too; keep the files mounted until it has ended
  for ((index = 0; index < 500; index++)); do
    [[ $(stat -c %d "$root/lower") == $(stat -c %d "$root") ]] || break
    kill -0 $! 2> /dev/null || fail "cannot mount $image on $node" "squashfuse failed; see the message above" "check the file: unsquashfs -s $image"
    sleep 0.01
  done
  read_image "$root/lower/etc/environment"
  read_edf
  describe
  hand_in
  set -- ${within[@]+"${within[@]}"} "$@"
  command=("$@")
  if [[ -f $root/lower/etc/rc && -z $entrypoint ]]; then
    printf 'exec "$@"\n' > "$root/rc.local" # the command script then only changes to the working directory
    flags+=(--volume "$root/rc.local:/etc/rc.local:ro")
  fi
  if [[ -n $workdir ]]; then
    if [[ -n $entrypoint && -f $root/lower/etc/rc ]]; then
      command=(/bin/sh /etc/rc /bin/sh -c 'cd -- "$1" && shift && exec "$@"' sh "$workdir" "$@")
    else
      flags+=(--workdir "$workdir")
    fi
  elif [[ -f $root/lower/etc/rc ]]; then
    command=(/bin/sh /etc/rc "$@")
  fi
  [[ -n $writable ]] || flags+=(--read-only)
  code=0
  "$engine" "${flags[@]}" --rootfs "$root/lower:O" "${command[@]}" || code=$?
  exit "$code"
}

# Runs this script in podman's user namespace, and exits with its exit code. `podman unshare` itself would exit with 0 as
# soon as it gets TERM (4.3.1), while the job inside may still be saving.
enter_as_user() {
  local root=$1 said code=0 pid='' inner=''
  shift
  said=$(mktemp)
  trap 'rm -f "$said"' EXIT
  trap : HUP INT TERM USR1 USR2
  # all podman processes of the user share this namespace: create another mount namespace
  podman unshare unshare --mount bash "$here/container.sh" --inside "$root" "$said" "$@" || code=$?
  { read -r pid && while [[ -d /proc/$pid ]]; do sleep 0.2 || true; done; } < "$said" || true
  { read -r pid && read -r inner; } < "$said" || true
  exit "${inner:-$((code ? code : 137))}"
}

read_host
case ${1-} in
  --inside) shift && enter_squashfs "$@" ;;
esac
case $image in
  /* | .* | '${'*'}/'*)
    [[ $engine == podman ]] || fail "$engine cannot run the squashfs file $image" "$engine runs only images from its storage or a registry" \
      "use podman or the sandbox, or write the name of an image in the EDF"
    root=${TMPDIR:-/tmp}/runner-container-$(id -u)
    own_folder "$root" # never removed, because another task may have mounts there
    if (($(id -u) == 0)); then
      exec unshare --mount bash "$here/container.sh" --inside "$root" '' "$@"
    fi
    enter_as_user "$root" "$@"
    ;;
  *) enter_image "$@" ;;
esac
