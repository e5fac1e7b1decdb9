#!/bin/sh
# The worker container's command: worker.sh HOST:PORT MODEL.py [options of `elastable worker`]
#
# `docker-compose up --exit-code-from master` stops the whole project as soon as ONE container ends, so the
# container must outlive its worker: a worker that dies or loses its connection is started again (the master sees
# a new worker and re-issues what the old one held), and one that is done waits until the master has gone. An error
# that every try would repeat ends the container at once.
set -u

master=$1
shift
tries=${ELASTABLE_WORKER_TRIES:-5}
tries_left=$tries
ENOUGH_S=300 # a worker that worked for so long has not failed in vain: the tries count anew
stopping=

stop() {
  stopping=yes
  kill -TERM "$worker" 2>/dev/null
}

while :; do
  began=$(date +%s)
  elastable worker --master "$master" "$@" &
  worker=$!
  echo "$worker" > /tmp/worker.pid # for the container's health check
  trap stop TERM INT
  wait "$worker"
  status=$?
  if [ "$stopping" ]; then
    wait "$worker" # the first wait was ended by the signal, not by the worker
    exit $?
  fi
  case $status in # the exit codes of `elastable --help`
    0) break ;;
    # Command line, input, model, credentials, role. Not 6: a store or shard comes back, and a master that goes on from
    # a checkpoint with it. Nor 7: where another master runs another job, the next try joins it.
    2 | 3 | 4 | 9 | 11) exit "$status" ;;
  esac
  if [ $(($(date +%s) - began)) -ge "$ENOUGH_S" ]; then tries_left=$tries; fi
  tries_left=$((tries_left - 1))
  if [ "$tries_left" -le 0 ]; then
    echo "worker.sh: the worker ended with exit code $status and no try is left" >&2
    exit "$status"
  fi
  echo "worker.sh: the worker ended with exit code $status; starting it again" >&2
  sleep 2
done

trap 'exit 0' TERM INT
echo $$ > /tmp/worker.pid
unanswered=0
while [ "$unanswered" -lt 3 ]; do # a master that is busy writing its results may miss one deadline
  sleep 2 &
  wait $! # unlike a plain sleep, it is interrupted by the stop signal
  if master-health.py "$master" 2>/dev/null; then unanswered=0; else unanswered=$((unanswered + 1)); fi
done
