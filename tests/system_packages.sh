#!/usr/bin/env bash
# The system packages that the tests use, where they are missing: a real sshd, and tmux for a real terminal.
set -euo pipefail
need=()
{ [ -x /usr/sbin/sshd ] || command -v sshd > /dev/null; } || need+=(openssh-server)
command -v tmux > /dev/null || need+=(tmux)
[ "${#need[@]}" -eq 0 ] && exit 0
as_root=()
if [ "$(id -u)" != 0 ]; then
  if ! sudo -n true 2> /dev/null; then
    echo "The tests need ${need[*]}, and you are not root: ask for 'apt-get install ${need[*]}', then run this again." >&2
    exit 1
  fi
  as_root=(sudo -n)
fi
export DEBIAN_FRONTEND=noninteractive
"${as_root[@]}" apt-get update -qq
"${as_root[@]}" apt-get install -y -qq --no-install-recommends "${need[@]}"
