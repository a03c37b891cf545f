#!/usr/bin/env bash
# Real SGLang on a CPU, in an environment of its own: install.sh VENV. About three minutes and 3.5 GB.
# Stand-ins (tests/sglang/standins, by name): sgl_kernel has no CPU wheel, torchvision's wheel is a CUDA build, and two
# Triton kernels of the hybrid models have no CPU form. A .pth file puts them on the path; SGLang itself is unmodified.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
venv=$1
stamp=$venv/.stamp-$(cat "$here/requirements.txt" "$here/install.sh" | sha256sum | cut -c1-16)
[ -e "$stamp" ] && exit 0
rm -rf "$venv"
"${PYTHON:-python3}" -m venv "$venv"
"$venv/bin/pip" install --quiet --disable-pip-version-check --no-deps -r "$here/requirements.txt"
site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
printf '%s\nimport hsx_torchvision_cpu\n' "$here/standins" > "$site/hsx_standins.pth"
SGLANG_USE_CPU_ENGINE=1 "$venv/bin/python" -c 'import sglang.srt.entrypoints.http_server' > /dev/null 2>&1 \
  || SGLANG_USE_CPU_ENGINE=1 "$venv/bin/python" -c 'import sglang.srt.entrypoints.http_server'
touch "$stamp"
