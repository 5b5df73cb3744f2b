# shellcheck shell=bash disable=SC2154,SC2034  # sandbox.sh sets and reads the variables
# Functions for sandbox.sh: GPUs and network cards inside the container. All of /dev is there; the libraries of NVIDIA's
# driver are the host's, since they must match its kernel module. They come from the first of these:
#
# 1. a CDI file (Container Device Interface) in /var/run/cdi or /etc/cdi
# 2. `nvidia-ctk cdi generate`
# 3. the libraries of the list below that `ldconfig -p` prints
#
# A CDI file also asks for `ldconfig` in the image, which would read every library of the image. Instead, the driver's
# libraries are also in a folder of their own, at the end of LD_LIBRARY_PATH.

driver_libraries='libcuda libcudadebugger libnvidia-allocator libnvidia-cfg libnvidia-compiler libnvidia-fatbinaryloader
  libnvidia-gpucomp libnvidia-ml libnvidia-nscq libnvidia-nvvm libnvidia-nvvm70 libnvidia-opencl libnvidia-pkcs11
  libnvidia-pkcs11-openssl3 libnvidia-ptxjitcompiler libnvidia-sandboxutils libnvidia-tileiras'
driver_programs='nvidia-smi nvidia-debugdump nvidia-persistenced nvidia-cuda-mps-control nvidia-cuda-mps-server
  nvidia-imex-ctl'
driver_sockets='/run/nvidia-persistenced/socket /run/nvidia-fabricmanager/socket /tmp/nvidia-mps'

declare -A shared=() # path in the container -> path on the host
declare -a shared_paths=() nodes=()

warn() { # WHAT BECAUSE TRY: once per node
  [[ ${SLURM_LOCALID:-0} != 0 ]] || printf 'runner: warning: %s\n  because: %s\n  try:     %s\n' "$1" "$2" "$3" >&2
}

# Creates /dev/nvidia-uvm. Without a container, the first CUDA program does this, by the setuid program nvidia-modprobe.
create_devices() {
  [[ ! -e /dev/nvidia-uvm && (-e /dev/nvidiactl || -e /proc/driver/nvidia/version) ]] || return 0
  ! command -v nvidia-modprobe > /dev/null || nvidia-modprobe -u -c=0 > /dev/null 2>&1 || true
}

# Raises the limit of locked memory as far as this user may, and warns about what this node refuses.
check_limits() {
  local device cards=() render=() limit
  ulimit -l "$(ulimit -Hl)" 2> /dev/null || true
  limit=$(ulimit -l)
  for device in /dev/infiniband/uverbs* /dev/cxi[0-9]*; do [[ ! -e $device ]] || cards+=("$device"); done
  if ((${#cards[@]} > 0)) && [[ $limit != unlimited ]]; then
    warn "this job may lock only $limit KiB of memory on $node" "network cards such as ${cards[0]} read and write locked memory" \
      "ask an admin to set LimitMEMLOCK=infinity for slurmd and PropagateResourceLimitsExcept=MEMLOCK in slurm.conf"
  fi
  [[ ! -e /dev/kfd ]] || render=(/dev/dri/renderD*) # ROCm needs them, CUDA does not
  for device in /dev/nvidiactl /dev/kfd "${render[@]}" "${cards[@]}"; do
    [[ ! -e $device || (-r $device && -w $device) ]] ||
      warn "this user may not open $device on $node" "it belongs to the group $(stat -c %G "$device")" \
        "ask an admin to add you to this group"
  done
  [[ -w /dev/shm ]] || warn "/dev/shm is not writable on $node" "NCCL and data loaders share memory there" \
    "ask an admin to mount it: mount -t tmpfs -o mode=1777 tmpfs /dev/shm"
}

# Sets `wanted` to the names of GPUs (`all`, or indexes and UUIDs), separated by commas; empty for none. An EDF's `devices`
# overrides NVIDIA_VISIBLE_DEVICES. Returns 1 if the container does not need the driver.
choose_gpus() {
  local device asked=()
  for device in "${devices[@]}"; do
    expand host "$device" devices
    [[ $REPLY != nvidia.com/gpu=* ]] || asked+=("${REPLY#*=}")
  done
  wanted=${inside[NVIDIA_VISIBLE_DEVICES]:-all}
  if ((${#asked[@]} > 0)); then
    wanted=$(IFS=, && printf '%s' "${asked[*]}")
    [[ -e /dev/nvidiactl ]] || fail "$node has no NVIDIA GPU" "\`devices\` asks for nvidia.com/gpu=${asked[0]}, but there is no /dev/nvidiactl" \
      "request GPUs from Slurm, or remove the entry from \`devices\`"
  fi
  wanted=${wanted//nvidia.com\/gpu=/}
  case $wanted in
    void) wanted='' && return 1 ;; # neither GPUs nor the driver
    none) wanted='' ;;             # the driver alone
  esac
  [[ -e /dev/nvidiactl ]]
}

share() { # HOST_PATH PATH
  local path=${2/#\/var\/run\//\/run\/} # a link to /run in most images
  [[ -e $1 && $path == /* && $path != */../* ]] || return 0
  [[ -n ${shared[$path]-} ]] || shared_paths+=("$path")
  shared[$path]=$1
}

# The names of a shared library that the dynamic loader looks for: the links to it beside it on the host.
share_links() {
  local path link
  for path in "${shared_paths[@]}"; do
    [[ ${path##*/} == lib*.so.* ]] || continue
    for link in "${shared[$path]%%.so.*}".so*; do
      [[ ! -L $link || ! $link -ef ${shared[$path]} ]] || share "$link" "${path%/*}/${link##*/}"
    done
  done
}

# Applies the actions that cdi.awk has printed. Returns 1, with the missing file in REPLY, if the driver has been replaced
# since the CDI file was written.
apply_cdi() {
  local actions=$1 what first second target links=()
  while IFS=$'\t' read -r what first second; do
    [[ $what != mount || $first != *.so.* || -e $first ]] || { REPLY=$first && return 1; }
  done <<< "$actions"
  while IFS=$'\t' read -r what first second; do
    case $what in
      mount) share "$first" "$second" ;;
      node) nodes+=("$first" "$second") ;;
      env) inside[${first%%=*}]=${first#*=} && unset "dropped[${first%%=*}]" ;;
      link) links+=("$first" "$second") ;;
      compat) use_compat "$first" ;;
    esac
  done <<< "$actions"
  share_links
  while ((${#links[@]} > 0)); do # a link to a shared file is another path of that file
    target=${links[0]}
    [[ $target == /* ]] || target=$(realpath -sm -- "${links[1]%/*}/$target")
    [[ -z ${shared[$target]-} ]] || share "${shared[$target]}" "${links[1]}"
    links=("${links[@]:2}")
  done
}

# Applies the first CDI file for NVIDIA's GPUs that fits the driver. A file of /var/run overrides one of /etc.
read_cdi() {
  local file actions missing names
  for file in /var/run/cdi/*.json /var/run/cdi/*.yaml /etc/cdi/*.json /etc/cdi/*.yaml; do
    [[ -r $file ]] || continue
    actions=$(awk -v wanted="$wanted" -f "$here/cdi.awk" "$file") || continue
    [[ -n $actions ]] || continue
    if [[ $actions == missing$'\t'* ]]; then
      IFS=$'\t' read -r _ missing names <<< "$actions"
      fail "$node has no GPU $missing" "$file describes: $names" "correct NVIDIA_VISIBLE_DEVICES, or \`devices\` in the EDF"
    fi
    ! apply_cdi "$actions" || return 0
    warn "$file does not fit the driver of $node" "it names $REPLY, which does not exist" \
      "ask an admin to write it again: nvidia-ctk cdi generate --output=$file"
  done
  return 1
}

generate_cdi() {
  local actions
  command -v nvidia-ctk > /dev/null || return 1
  actions=$(timeout 30 nvidia-ctk cdi generate 2> /dev/null | awk -v wanted="$wanted" -f "$here/cdi.awk") || return 1
  [[ -n $actions && $actions != missing* ]] && apply_cdi "$actions"
}

# Shares the driver's libraries that the host's dynamic loader knows, and its programs and sockets.
read_ldconfig() {
  local listed name path kind=x86-64 folder=/usr/lib64 program socket
  PATH=$PATH:/usr/sbin:/sbin listed=$(ldconfig -p 2> /dev/null) || listed=''
  [[ $(uname -m) == x86_64 ]] || kind=AArch64
  for path in "/usr/lib/$(uname -m)-linux-gnu" /usr/lib64 /usr/lib; do # where the image's loader looks
    if [[ -d $base/root$path ]]; then folder=$path && break; fi
  done
  while read -r name path; do share "$path" "$folder/$name"; done < <(
    awk -v kind="$kind" -v names="$driver_libraries" '
      BEGIN { split(names, list); for (each in list) known[list[each]] = 1 }
      { name = $1; sub(/\.so.*/, "", name) }
      name in known && index($0, kind) && !seen[$1]++ { print $1, $NF }' <<< "$listed"
  )
  [[ -n ${shared[$folder/libcuda.so.1]-} ]] || return 1
  share "${shared[$folder/libcuda.so.1]}" "$folder/libcuda.so"
  for program in $driver_programs; do
    ! path=$(command -v "$program") || share "$path" "/usr/bin/$program"
  done
  for socket in $driver_sockets; do share "$socket" "$socket"; done
  path=$(realpath -- "${shared[$folder/libcuda.so.1]}")
  use_compat "${path##*libcuda.so.}"
  choose_nodes
}

# Fills `nodes` with the devices of `wanted`. An index counts the GPUs in the order of their PCI addresses, as nvidia-smi does.
choose_nodes() {
  local file index=0 uuid minor names=()
  for file in /proc/driver/nvidia/gpus/*/information; do
    [[ -r $file ]] || continue
    uuid=$(awk '/^GPU UUID:/ { print $3 }' "$file") minor=$(awk '/^Device Minor:/ { print $3 }' "$file")
    names+=("$index" "$uuid")
    [[ ,$wanted, != *,all,* && ,$wanted, != *",$index,"* && ,$wanted, != *",$uuid,"* ]] ||
      nodes+=("/dev/nvidia$minor" "/dev/nvidia$minor")
    index=$((index + 1))
  done
  for uuid in ${wanted//,/ }; do
    [[ $uuid == all || " ${names[*]-} " == *" $uuid "* ]] || fail "$node has no GPU $uuid" "it has: ${names[*]-none}" \
      "correct NVIDIA_VISIBLE_DEVICES, or \`devices\` in the EDF"
  done
}

# If the image's CUDA is newer than the driver, the image's compatibility libraries come first.
use_compat() { # HOST_DRIVER_VERSION
  local file version
  for file in "$base"/root/usr/local/cuda-*/compat/{,lib.real/}libcuda.so.*.*; do
    version=${file##*libcuda.so.}
    [[ -e $file && ${version%%.*} =~ ^[0-9]+$ && ${1%%.*} =~ ^[0-9]+$ ]] || continue
    ((${version%%.*} > ${1%%.*})) || continue
    file=${file#"$base/root"}
    inside[LD_LIBRARY_PATH]=${file%/*}${inside[LD_LIBRARY_PATH]:+:${inside[LD_LIBRARY_PATH]}}
    return
  done
}

# Fills `device_binds` with bubblewrap's options for /dev: all of it, or all but the GPUs that are not wanted.
show_devices() {
  local -A shown=()
  local index entry private=''
  device_binds=(--dev-bind /dev /dev)
  for ((index = 0; index < ${#nodes[@]}; index += 2)); do
    shown[${nodes[index + 1]}]=${nodes[index]}
    [[ ${nodes[index]} == "${nodes[index + 1]}" ]] || private=1
  done
  for entry in /dev/nvidia[0-9]*; do
    [[ ! -e $entry || $wanted == all || -n ${shown[$entry]-} ]] || private=1
  done
  [[ -n $private ]] || return 0
  device_binds=(--dev /dev)
  for entry in /dev/*; do
    case $entry in
      /dev/null | /dev/zero | /dev/full | /dev/random | /dev/urandom | /dev/tty | /dev/console | /dev/ptmx) ;;
      /dev/pts | /dev/fd | /dev/std* | /dev/core | /dev/nvidia[0-9]*) ;;
      *) [[ -n ${shown[$entry]-} ]] || device_binds+=(--dev-bind-try "$entry" "$entry") ;;
    esac
  done
  for entry in "${!shown[@]}"; do device_binds+=(--dev-bind "${shown[$entry]}" "$entry"); done
}

# Fills `device_binds`, and adds the driver to `binds` and to the container's variables. The only function that
# sandbox.sh calls in the namespace.
add_gpus() {
  local wanted='' driver_folder=/usr/local/nvidia path links=() programs=''
  check_limits
  choose_gpus || {
    show_devices
    return 0
  }
  read_cdi || generate_cdi || read_ldconfig || {
    warn "programs in the container cannot use the GPUs of $node" "no CDI file fits, nvidia-ctk is missing or fails, and ldconfig lists no libcuda.so.1" \
      "ask an admin to run: nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml"
    show_devices
    return 0
  }
  show_devices
  # without an overlay, files can only be mounted over files of the image, and in /tmp
  [[ -n $overlay ]] || driver_folder=/tmp/.nvidia
  mkdir -p "$base/nvidia/lib64" "$base/nvidia/bin"
  binds+=(--bind "$base/nvidia" "$driver_folder")
  for path in "${shared_paths[@]}"; do
    if [[ -n $overlay ]]; then
      [[ ! -L $base/root$path ]] || rm -f -- "$base/root$path"
      binds+=(--ro-bind "${shared[$path]}" "$path")
      [[ ${path##*/} != lib*.so* ]] || links+=("$path")
    elif [[ ${path##*/} == lib*.so* ]]; then
      binds+=(--ro-bind "${shared[$path]}" "$driver_folder/lib64/${path##*/}")
    elif [[ $path == */bin/* ]]; then
      binds+=(--ro-bind "${shared[$path]}" "$driver_folder/bin/${path##*/}")
      programs=1
    elif [[ -e $base/root$path || $path == /tmp/* ]]; then
      binds+=(--ro-bind "${shared[$path]}" "$path")
    fi
  done
  ((${#links[@]} == 0)) || ln -sf -- "${links[@]}" "$base/nvidia/lib64/"
  [[ -z $programs ]] || inside[PATH]=${inside[PATH]}:$driver_folder/bin
  inside[LD_LIBRARY_PATH]=${inside[LD_LIBRARY_PATH]:+${inside[LD_LIBRARY_PATH]}:}$driver_folder/lib64
  unset 'dropped[LD_LIBRARY_PATH]'
}
