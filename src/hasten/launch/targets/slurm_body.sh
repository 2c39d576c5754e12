
set -u
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export HASTEN_HEAD="$head:@port@"
asked=0
heard=0
leave() { # Slurm's warning before the time limit, or scancel --signal=USR1 --batch
  asked=1
  heard=1
  kill -USR1 "$step" # srun hands it to node.sh
}
# All cores of the node for the one task of the node; torchrun makes the ranks.
srun --ntasks-per-node=1 --cpu-bind=none @loss@ bash @node@ &
step=$!
trap leave USR1
while :; do
  code=0
  wait "$step" || code=$?
  [ "$heard" = 1 ] || break
  heard=0
done
if [ "$code" = 75 ] && [ "$asked" = 1 ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
