#!/usr/bin/env bash
# Trains on several machines, which may come and go. Run the same line on each of them:
#
#     HEAD=node0:29400 NNODES=1:3 NPROC=8 examples/launch/torchrun.sh train.py --options of the script
#
# HEAD      a machine of the job that all others can reach, and a free port on it; its torchrun holds the store there
# NNODES    how many machines, or the least and the most of them (2): with 1:3 the job starts with those that have come, and
#           starts again when one leaves or another comes; a Checkpoint resumes on the new number of ranks
# NPROC     processes on each: a number, or "gpu" for one per GPU (gpu)
# JOB       a name, the same on all machines and another for each job at the same HEAD (train)
# RESTARTS  how often the failure of one process starts all of them again, on all machines (3)
#
# Any other option of torchrun can be set as PET_..., PET_LOCAL_ADDR for --local-addr. A machine with several networks may
# have to be told which one is meant: GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME are names of interfaces.
set -euo pipefail
: "${HEAD:?is where the machines meet: host:port, the same on all of them}"

options=(
    --nnodes="${NNODES:-2}"
    --nproc_per_node="${NPROC:-gpu}"
    --rdzv_backend=c10d # ranks are dealt out when all have come: no --node_rank
    --rdzv_endpoint="$HEAD"
    --rdzv_id="${JOB:-train}"
    --max-restarts="${RESTARTS:-3}"
    # Passed on to the processes; SIGUSR1 would otherwise end torchrun and leave them behind.
    --signals-to-handle='SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1'
)
# Seconds from there to SIGKILL: a little more than StopOnSignal's grace_seconds. torch 2.11 always waits 30.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=30
# A store of its own for each start: in the one that torchrun shares, gloo finds the addresses of processes that have died. It
# listens at a free port of the machine of rank 0.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=${TORCH_DISABLE_SHARE_RDZV_TCP_STORE:-1}
exec torchrun "${options[@]}" "$@"
