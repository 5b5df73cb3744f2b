#!/bin/sh
# Records the kernel, driver, GPUs, Python and packages inside the container in ATTEMPT/inside.toml. It runs beside the
# program, which does not wait for it.
#   inside.sh ATTEMPT PYTHON
exec >"$1/.inside.partial" 2>/dev/null </dev/null
line() { [ -z "$2" ] || printf '%s = "%s"\n' "$1" "$(printf '%s' "$2" | tr -d '"\\\n')"; }
line kernel "$(uname -r)"
line machine "$(uname -m)"
line system "$(sed -n 's/^PRETTY_NAME=//p' /etc/os-release)"
line driver "$(sed -n 's/^NVRM version:.*Module[^0-9]*\([0-9.]*\).*/\1/p' /proc/driver/nvidia/version)"
line gpus "$(sed -n 's/^Model:[[:space:]]*//p' /proc/driver/nvidia/gpus/*/information | sort | uniq -c | tr -s ' \n' ' ')"
line cuda "${CUDA_VERSION:-}"
"$2" -B -c '
import os, platform, re, sys
print("python = \"%s\"\n\n[packages]" % platform.python_version())
found = {}
for place in sys.path:  # only the names of the folders: reading the metadata files takes longer
    try:
        names = os.listdir(place or ".")
    except OSError:
        continue
    for name in names:
        match = re.match(r"([A-Za-z0-9._]+)-([^-]+?)(-py3[.0-9]*)?\.(dist-info|egg-info|egg)$", name)
        if match:
            found.setdefault(match.group(1).lower().replace("_", "-"), match.group(2))
for name in sorted(found):
    print("\"%s\" = \"%s\"" % (name, found[name]))
'
mv "$1/.inside.partial" "$1/inside.toml"
