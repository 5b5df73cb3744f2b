# shellcheck shell=bash
# Nodes in network namespaces, on one bridge, each with a network of 200 Mbit/s. The nodes A and B reach each other only by a
# link of 20 Mbit/s; if A and B are the same, there is none. Runs WORD… once on each node, with the variables of its rank.
#   unshare --net --mount --map-root-user bash network_nodes.sh NODES A B WORD…
set -e
nodes=$1 a=$2 b=$3
shift 3
mount -t tmpfs none /run # `ip netns` keeps its names there
mkdir /run/netns
ip link set lo up
ip link add bridge0 type bridge
ip link set bridge0 up
for ((n = 0; n < nodes; n++)); do
    ip netns add "n$n"
    ip link add "v$n" type veth peer name eth0 netns "n$n"
    ip link set "v$n" master bridge0 up
    ip -n "n$n" addr add "10.77.0.$((n + 1))/24" dev eth0
    ip -n "n$n" link set eth0 up
    ip -n "n$n" link set lo up
    tc -n "n$n" qdisc add dev eth0 root tbf rate 200mbit burst 64kb latency 100ms
done
if [ "$a" != "$b" ]; then
    ip link add slow netns "n$a" type veth peer name slow netns "n$b"
    for n in "$a" "$b"; do
        ip -n "n$n" link set slow up
        tc -n "n$n" qdisc add dev slow root tbf rate 20mbit burst 32kb latency 100ms
        ip -n "n$n" route add "10.77.0.$((a + b - n + 1))/32" dev slow src "10.77.0.$((n + 1))"
    done
fi
export GLOO_SOCKET_IFNAME=eth0 MASTER_ADDR=10.77.0.1 MASTER_PORT=29500 WORLD_SIZE=$nodes LOCAL_WORLD_SIZE=1 LOCAL_RANK=0
for ((n = 0; n < nodes; n++)); do RANK=$n SLURMD_NODENAME=nid$n ip netns exec "n$n" "$@" & done
wait
