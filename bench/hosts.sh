#!/usr/bin/env bash
# Runs bench_hosts on two hosts with two ranks each: network namespaces on a switch. Needs root.
#
#   BENCH_FOLDER  folder of our programs
set -euo pipefail
: "${BENCH_FOLDER:?}"
name=bench$$
spaces="${name}switch ${name}a ${name}b"
trap 'for space in $spaces; do ip netns del "$space" 2>/dev/null || true; done' EXIT
for space in $spaces; do ip netns add "$space"; done
ip -netns "${name}switch" link add switch type bridge
ip -netns "${name}switch" link set switch up
number=0
for host in a b; do
  number=$((number + 1))
  ip -netns "${name}switch" link add "port$host" type veth peer name eth0 netns "$name$host"
  ip -netns "${name}switch" link set "port$host" master switch up
  ip -netns "$name$host" link set lo up
  ip -netns "$name$host" addr add "10.77.0.$number/24" dev eth0
  ip -netns "$name$host" link set eth0 up
done

export WORLD_SIZE=4 LOCAL_WORLD_SIZE=2 MASTER_ADDR=10.77.0.1 MASTER_PORT=29500 OMP_NUM_THREADS=1 ACCELERATE_USE_CPU=1
rank=0
for host in a a b b; do
  RANK=$rank LOCAL_RANK=$((rank % 2)) nsenter --net="/run/netns/$name$host" \
    unshare --uts sh -c 'hostname "$1" && exec "$2"' sh "$host" "$BENCH_FOLDER/bench_hosts" 2>/dev/null &
  rank=$((rank + 1))
done
wait
