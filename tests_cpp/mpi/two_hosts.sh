#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs four ranks on two hosts, two on each: network namespaces with host names of their own, which
# are connected by a cable. Ends with 77 where that cannot be had.
#
# Usage: two_hosts.sh MPIRUN PROGRAM [ARGUMENT...]
set -euo pipefail

skip() {
  echo "SKIPPED: $*"
  exit 77
}
mpirun=$1
shift
[[ -x $mpirun ]] || skip "there is no mpirun ('$mpirun')"
command -v ip >/dev/null || skip "there is no ip command (iproute2)"

here="ff$$a"
there="ff$$b"
folder=$(mktemp -d)
cleanup() {
  ip netns del "$here" 2>/dev/null || true
  ip netns del "$there" 2>/dev/null || true
  rm -r "$folder"
}
trap cleanup EXIT
ip netns add "$here" 2>/dev/null || skip "network namespaces need more rights"
ip netns add "$there"
ip link add "$here" netns "$here" type veth peer name "$there" netns "$there" 2>/dev/null ||
  skip "there are no veth devices"
ip -n "$here" addr add 10.77.1.1/24 dev "$here"
ip -n "$there" addr add 10.77.1.2/24 dev "$there"
for host in "$here" "$there"; do
  ip -n "$host" link set lo up
  ip -n "$host" link set "$host" up
done

# What mpirun calls in place of ssh: the address, then a command.
cat >"$folder/remote_shell" <<TEXT
#!/usr/bin/env bash
shift
exec ip netns exec $there unshare --uts bash -c "hostname $there; \$*"
TEXT
chmod +x "$folder/remote_shell"

options=(--allow-run-as-root --oversubscribe --mca mpi_yield_when_idle 1 --tag-output)
options+=(--mca plm_rsh_agent "$folder/remote_shell" --mca btl "tcp,vader,self")
options+=(--mca btl_tcp_if_include 10.77.1.0/24 --mca oob_tcp_if_include 10.77.1.0/24)
options+=(-host "10.77.1.1:2,10.77.1.2:2" -n 4)
timeout -k 3 60 ip netns exec "$here" unshare --uts bash -c \
  "hostname $here; exec \"\$@\"" mpirun "$mpirun" "${options[@]}" "$@" </dev/null
