#!/usr/bin/env bash
# shellcheck disable=SC1091,SC2016,SC2034,SC2154  # three files are sourced; quoted references are for the shell inside
# Runs a command inside a squashfs image, with the programs that every distribution packages: squashfuse (or unsquashfs)
# and bubblewrap. Needs no daemon and no root. Usage: bash sandbox.sh COMMAND…
# sandbox.conf beside this file describes the container.
#
# Everything is mounted in a private mount and process namespace. When the command ends, or when this process is killed in
# any way, the kernel removes the namespaces, and with them the mounts and squashfuse. Only if /dev/fuse is missing, the
# image is unpacked to a folder that the tasks of a node share, and that the last of them removes.
set -euo pipefail
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)
source "$here/environment.sh"
source "$here/gpus.sh"
image='' workdir='' entrypoint='' writable='' mounts=() env=() devices=()
source "$here/sandbox.conf"

me=$(id -u)
scratch=${TMPDIR:-/tmp}
[[ -d $scratch && -w $scratch ]] || scratch=/tmp
node=${SLURMD_NODENAME:-$(uname -n)}

need() { # PROGRAM PACKAGE
  command -v "$1" > /dev/null || fail "$1 is missing on $node" "the engine 'sandbox' needs it" \
    "ask an admin to install $2, or use another engine: --engine podman"
}

check_image() {
  local first
  expand host "$image" image
  absolute "$REPLY"
  image=$REPLY
  [[ -f $image ]] || fail "there is no image $image on $node" "the file does not exist, or this user cannot read its folder" \
    "runner import NAME, into a folder that every node sees"
  first=$(head -c 4 -- "$image")
  [[ $first == hsqs ]] || fail "$image is not a squashfs image" "it does not begin as a squashfs file does" "import it again: runner import NAME --force"
}

# ---- first stage: on the host ---------------------------------------------------------------------------------------

# The folder of the unpacked image. Descriptor 9 holds a shared lock of it while a process of this job runs.
unpack() {
  local store=$scratch/runner-unpacked-$me key old
  need unsquashfs squashfs-tools
  own_folder "$store"
  key=$(stat -c '%n %s %Y %i' -- "$image" | sha256sum | cut -c1-16)
  for old in "$store"/*.lock; do # left behind by a killed job
    [[ -e $old && $old != "$store/$key.lock" ]] || continue
    # shellcheck disable=SC2094  # the lock file is only locked
    (flock -n 8 && rm -rf "${old%.lock}" "$old") 8> "$old" || true
  done
  until take "$store/$key"; do :; done
  unpacked=$store/$key
}

# Locks FOLDER.lock (shared), and unpacks the image to FOLDER if no other task has. Fails if another task has removed both
# meanwhile, which can happen before we get the lock, and while an exclusive lock becomes a shared one.
take() {
  local folder=$1
  { exec 9> "$folder.lock" && flock 9; } || fail "cannot lock $folder.lock on $node" "see the message above" "set TMPDIR to a local folder"
  [[ /proc/self/fd/9 -ef $folder.lock ]] || return 1
  if [[ ! -e $folder/complete ]]; then
    { rm -rf "${folder:?}" && mkdir "$folder"; } || fail "cannot create $folder on $node" "see the message above" "set TMPDIR to your own folder"
    unsquashfs -quiet -no-progress -no-xattrs -d "$folder/root" "$image" > /dev/null || {
      rm -rf "${folder:?}"
      fail "cannot unpack $image on $node" "unsquashfs failed; see the message above (is $scratch full?)" \
        "set TMPDIR to a folder with more space, or let this user open /dev/fuse"
    }
    : > "$folder/complete"
  fi
  flock -s 9
  [[ /proc/self/fd/9 -ef $folder.lock && -e $folder/complete ]]
}

# The last task of the node that used the unpacked image removes it.
drop_unpacked() {
  if flock -n 9; then rm -rf "${unpacked:?}" "$unpacked.lock"; fi
}

first_stage() {
  local map=() code=0 signal child user group
  need bwrap bubblewrap
  need unshare util-linux
  read_host
  check_image
  create_devices
  ((me == 0)) && unshare --mount true 2> /dev/null || map=(--map-root-user)
  unshare "${map[@]}" --mount true 2> /dev/null ||
    fail "this user may not create namespaces on $node" "unshare ${map[*]} --mount is refused" \
      "ask an admin to allow user namespaces (user.max_user_namespaces, kernel.unprivileged_userns_clone, kernel.apparmor_restrict_unprivileged_userns)"
  own_folder "$scratch/runner-sandbox-$me" # never removed, because another task may have mounts there
  user=$(id -un 2> /dev/null) || user=u$me # without a user name, id prints the number and fails
  group=$(id -gn 2> /dev/null) || group=g$(id -g)
  local command=(unshare "${map[@]}" --mount --pid --fork --kill-child)
  "${command[@]}" --mount-proc true 2> /dev/null && command+=(--mount-proc)
  command+=(bash "$here/sandbox.sh" --second-stage "$(id -g)" "$user" "$me" "$PWD" "$group")
  if [[ -w /dev/fuse && -z ${RUNNER_SANDBOX_UNPACK-} ]] && command -v squashfuse > /dev/null; then
    exec "${command[@]}" '' -- "$@"
  fi
  unpack
  "${command[@]}" "$unpacked/root" -- "$@" <&0 &
  child=$!
  for signal in TERM INT HUP USR1 USR2 CONT; do
    # shellcheck disable=SC2064  # the child's process id is expanded now, on purpose
    trap "kill -s $signal -- $child 2> /dev/null || true" "$signal"
  done
  while :; do
    code=0
    wait "$child" || code=$?
    kill -0 "$child" 2> /dev/null || break
  done
  drop_unpacked
  exit "$code"
}

# ---- second stage: root of a private namespace ----------------------------------------------------------------------

# Mounts a squashfs file. As with enroot, all files belong to the user: squashfuse has an option for this (uid=0), but
# squashfuse_ll, with which torch is imported in half the time, has not. It is used if this user namespace has all ids
# (real root), or if the file has only one owner.
mount_squashfs() {
  local _ outside count
  read -r _ outside count < /proc/self/uid_map
  if command -v squashfuse_ll > /dev/null &&
    { [[ $outside == 0 && $count -gt 65535 ]] ||
      [[ $(unsquashfs -s "$1" 2> /dev/null)$'\n' == *'Number of ids 1'$'\n'* ]]; }; then
    steady squashfuse_ll "$1" "$2" && return
  fi
  steady squashfuse -o uid=0,gid=0 "$1" "$2"
}

# Mounts the image at $base/lower. With RUNNER_TRACE, squashfuse writes to that file what programs open and read.
mount_image() {
  if [[ -z ${RUNNER_TRACE-} ]]; then
    # the tasks of a node share its page cache
    ((${SLURM_LOCALID:-0} > 0)) || read_ahead "$image" > /dev/null 2>&1 &
    mount_squashfs "$image" "$base/lower"
    return
  fi
  steady squashfuse -d -s -o uid=0,gid=0 "$image" "$base/lower" > "$RUNNER_TRACE" 2>&1 &
  until mountpoint -q "$base/lower"; do
    kill -0 $! 2> /dev/null || return 1
    sleep 0.05
  done
}

# Reads ahead what a start reads: `runner import --trace` lists it in the last 4 KiB of the file.
read_ahead() {
  local offset length end piece=$((8 << 20))
  tail -c 4096 -- "$1" | tr -d '\0' | sed -n 's/^hot \([1-9][0-9]* [1-9][0-9]*\)$/\1/p' |
    while read -r offset length; do
      for ((end = offset + length; offset < end; offset += piece)); do
        printf '%d %d\n' "$offset" $((end - offset < piece ? end - offset : piece))
      done
    done |
    xargs -r -n 2 -P 8 sh -c 'dd if="$0" of=/dev/null bs=1M iflag=skip_bytes,count_bytes skip="$1" count="$2"' "$1"
}

# Mounts the image at $base/lower, and a writable file system over it at $base/root.
mount_root() {
  local lower=$1 options
  mount -t tmpfs -o mode=0755 tmpfs "$base"
  mkdir "$base/lower" "$base/upper" "$base/work" "$base/root"
  if [[ -n $lower ]]; then
    mount --bind "$lower" "$base/lower"
  else
    mount_image ||
      fail "cannot mount $image on $node" "squashfuse failed; see the message above" "check the file: unsquashfs -s $image"
  fi
  options=lowerdir=$base/lower,upperdir=$base/upper,workdir=$base/work
  if mount -t overlay overlay -o "$options,userxattr" "$base/root" 2> /dev/null ||
    mount -t overlay overlay -o "$options" "$base/root" 2> /dev/null ||
    { [[ -w /dev/fuse ]] && command -v fuse-overlayfs > /dev/null && steady fuse-overlayfs -o "$options" "$base/root"; }; then
    overlay=1
  else
    mount --rbind "$base/lower" "$base/root"
    overlay=''
    [[ -z $writable ]] ||
      echo "runner: warning: $node has no overlay for users: the image's files cannot be written there" >&2
  fi
}

# Adds what enroot adds to an image: the user, a home folder, and what the command script needs.
furnish() {
  local gid=$1 user=$2 uid=$3 group=$4 root=$base/root name
  [[ -n $overlay ]] || return 0
  mkdir -p "$root"/{proc,sys,dev,tmp,etc}
  cut -d: -f3 "$root/etc/passwd" 2> /dev/null | grep -qx "$uid" ||
    printf '%s:x:%s:%s:%s:%s:/bin/sh\n' "$user" "$uid" "$gid" "$user" "${inside[HOME]:-/}" >> "$root/etc/passwd"
  cut -d: -f3 "$root/etc/group" 2> /dev/null | grep -qx "$gid" ||
    printf '%s:x:%s:\n' "$group" "$gid" >> "$root/etc/group"
  for name in hosts resolv.conf; do
    [[ ! -L $root/etc/$name ]] || rm "$root/etc/$name" # a link into the host's /run would be broken here
    [[ -e $root/etc/$name ]] || : > "$root/etc/$name"
  done
  case ${inside[HOME]-} in
    /tmp* | '') ;;
    /*) mkdir -p "$root${inside[HOME]}" 2> /dev/null || true ;;
  esac
  # without the entrypoint, the command script only changes to the working directory, as with pyxis
  [[ -n $entrypoint || ! -f $root/etc/rc ]] || printf 'exec "$@"\n' > "$root/etc/rc.local"
}

# Fills `binds` with bubblewrap's options for the mounts of the EDF.
bind_mounts() {
  local index source target flags kind
  for ((index = 0; index < ${#mounts[@]}; index += 3)); do
    expand host "${mounts[index]}" "mounts.$((index / 3))"
    absolute "$REPLY"
    source=$REPLY flags=+${mounts[index + 2]}+
    expand host "${mounts[index + 1]}" "mounts.$((index / 3))"
    target=$REPLY
    [[ -e $source ]] || fail "the mount source $source does not exist on $node" \
      "mounts.$((index / 3)) mounts $source at $target" "create $source, correct the path, or remove the mount from the EDF"
    kind=--bind
    [[ $flags == *+ro+* ]] && kind=--ro-bind
    if [[ $flags == *+sqsh+* ]]; then
      mkdir "$base/sqsh$index"
      mount_squashfs "$source" "$base/sqsh$index" ||
        fail "cannot mount $source on $node" "squashfuse failed; see the message above" "check the file: unsquashfs -s $source"
      source=$base/sqsh$index kind=--ro-bind
    fi
    binds+=("$kind" "$source" "$target")
  done
}

second_stage() {
  local gid=$1 user=$2 uid=$3 start=$4 group=$5 lower=$6 name bwrap base overlay='' binds=() device_binds=() command=() chdir=()
  shift 7
  bwrap=$(command -v bwrap)
  base=$scratch/runner-sandbox-$uid
  cd -- "$start" 2> /dev/null || cd /
  read_host
  check_image
  mount_root "$lower"
  read_image "$base/root/etc/environment"
  read_edf
  for name in /etc/hosts /etc/resolv.conf; do # without an overlay, a file that the image lacks cannot be created
    [[ -z $overlay && ! -e $base/root$name ]] || binds+=(--ro-bind-try "$name" "$name")
  done
  add_gpus
  list_inside
  furnish "$gid" "$user" "$uid" "$group"
  bind_mounts
  ((uid == 0)) || binds+=(--unshare-user --uid "$uid" --gid "$gid")
  [[ -n $writable || -z $overlay ]] || binds+=(--remount-ro /)
  if [[ -n $workdir ]]; then
    chdir=(--chdir "$workdir")
  else
    chdir=(--chdir /)
  fi
  command=("$@")
  if [[ -f $base/root/etc/rc && -n $entrypoint && -n $workdir ]]; then
    command=(/bin/sh /etc/rc /bin/sh -c 'cd -- "$1" && shift && exec "$@"' sh "$workdir" "$@")
  elif [[ -f $base/root/etc/rc && (-n $entrypoint || (-z $workdir && -n $overlay)) ]]; then
    command=(/bin/sh /etc/rc "$@")
  fi
  exec env "${final[@]}" "$bwrap" --bind "$base/root" / "${device_binds[@]}" --bind /proc /proc --bind /sys /sys \
    --perms 1777 --tmpfs /tmp "${binds[@]}" "${chdir[@]}" -- "${command[@]}"
}

if [[ ${1-} == --second-stage ]]; then
  shift
  second_stage "$@"
else
  first_stage "$@"
fi
