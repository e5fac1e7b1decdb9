#!/usr/bin/env bash
# Proves docker-compose.yml on a real engine, with a small but real job:
#
#   1. one store server and two workers; one worker container is killed in the middle; the master still ends with exit code
#      0, and no container has compiled a kernel: the image brings them
#   2. `up` once more on the same volumes trains anew, in containers that are confined; Redis is killed in the middle and
#      comes back with all it had, the job goes on; then the master is killed, and `up --detach` brings it back to go on
#      where it was
#   3. the master and Redis are lost with their volumes in the middle: the worker containers join the job that begins anew,
#      while the master is full of calls that say nothing and still answers health checks
#   4. `up --exit-code-from master --scale store=3 --scale worker=4`, one worker process killed inside its container: it
#      exits 0, and so do the other workers
#   5. two store servers and two workers over mutual TLS with tokens (deploy/tls.yml; in plain text where there is no openssl
#      to make certificates with), while a client without them is refused; nobody is disturbed
#   6. a rolling restart in the middle: Redis, three store servers, of which one was killed before, two workers and the
#      master are restarted, one container after the other; rows, optimizer states and weights of the last checkpoint are
#      those of the undisturbed job, to the last bit
#   7. a master that cannot begin ends `up` at once, and says why
#
# All that train must train every version, reach MIN_AUC, and give the same numbers to the last bit: in sync mode the number
# of workers and store servers, their deaths and the wire change nothing. A master that ends or starts again by itself is
# noticed at once; all limits are for machines that are slow. Everything it starts belongs to a project of its own and is
# removed at the end; the image stays, as elastable:compose-test, and makes the next run's build short. Base images that can
# be neither found nor pulled are built from Debian packages (base-images.sh).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

PROJECT=elastable-test-$$
UP_SECONDS=${UP_SECONDS:-1200} # for one training from the first container to the last
MIN_AUC=${MIN_AUC:-0.75}
PYTHON=${PYTHON:-python3}
export PYTHON_IMAGE=${PYTHON_IMAGE:-python:3.11-slim} REDIS_IMAGE=${REDIS_IMAGE:-redis:7}
export ELASTABLE_IMAGE=elastable:compose-test
export ELASTABLE_EPOCHS=${ELASTABLE_EPOCHS:-3}
export ELASTABLE_MICRO_BATCH_SIZE=${ELASTABLE_MICRO_BATCH_SIZE:-256}
export ELASTABLE_GRADS_TO_WAIT=${ELASTABLE_GRADS_TO_WAIT:-2}
export ELASTABLE_MEMORY=${ELASTABLE_MEMORY:-6g} REDIS_MEMORY=${REDIS_MEMORY:-2gb}

say() { printf 'compose-test: %s\n' "$*"; }
fail() {
  say "FAILED: $*" >&2
  exit 1
}

if docker compose version >/dev/null 2>&1; then
  COMPOSE=(docker compose)
elif command -v docker-compose >/dev/null; then
  COMPOSE=(docker-compose)
else
  fail "neither 'docker compose' nor 'docker-compose' is installed"
fi
compose() { "${COMPOSE[@]}" --project-name "$PROJECT" "$@"; }

work=$(mktemp -d)
up=           # process id of an `up` in the background
redis_killed= # whether Redis was killed and came back
clean_up() {
  local status=$?
  if [ "$status" -ne 0 ]; then compose logs --no-color --tail 60 || true; fi
  compose down --volumes --remove-orphans --timeout 5 >/dev/null 2>&1 || true
  rm -rf "$work"
}
trap clean_up EXIT
trap 'say "FAILED at line $LINENO: $BASH_COMMAND" >&2' ERR
trap 'exit 130' INT
trap 'exit 143' TERM

# field NAME < JSON: one value of a JSON object.
field() { "$PYTHON" -c 'import json, sys; print(json.load(sys.stdin)[sys.argv[1]])' "$1"; }
job_status() { timeout 60 docker exec "$1" elastable status --master 127.0.0.1:50051 --json; }
exit_code() { docker inspect --format '{{.State.ExitCode}}' "$1"; }
container() { compose ps --quiet "$@"; }

# logged SERVICE TEXT: whether its containers have said it. (A pipe into grep -q would end the logs by a signal.)
logged() {
  compose logs --no-color "$1" > "$work/logs" 2>&1 || return 1
  grep -q "$2" "$work/logs"
}

# require_master: fails at once where the master has ended, or ended and was started again by its restart policy.
require_master() {
  local state
  state=$(docker inspect --format '{{.RestartCount}} {{.State.Status}} {{.State.ExitCode}}' "$(container master)" \
    2>/dev/null) || return 0
  # With `appendfsync everysec` a Redis whose disk is slow may lose a second when it is killed: a store server then ends with
  # the error that says so, and the master goes on from what is left.
  if [ "$redis_killed" ] && [[ $state == [1-9]*" running "* ]] && logged store 'the server has lost what was written last'
  then
    return 0
  fi
  case $state in
    "0 exited"* | "0 dead"* | [1-9]*)
      cat "$work/status.log" >&2
      fail "the master has ended before the middle of the job (restarts, state, exit code: $state)"
      ;;
  esac
}

# no_kernel_compiled CONTAINER...: fails where a kernel was compiled that the image does not bring.
no_kernel_compiled() {
  local one added
  for one in "$@"; do
    added=$(docker diff "$one" | grep '^A /var/cache/elastable/.*nbc$') || continue
    fail "container ${one:0:12} compiled kernels: $added"
  done
}

# wait_for_end MASTER: the master's exit code must be 0.
wait_for_end() {
  local code
  code=$(timeout "$UP_SECONDS" docker wait "$1") || fail "the master did not end within $UP_SECONDS s"
  [ "$code" -eq 0 ] || fail "the master ended with exit code $code"
}

# wait_until_healthy CONTAINER: returns once its health check says so.
wait_until_healthy() {
  local deadline=$((SECONDS + UP_SECONDS))
  until [ "$(docker inspect --format '{{.State.Health.Status}}' "$1")" = healthy ]; do
    [ "$SECONDS" -lt "$deadline" ] || fail "container ${1:0:12} is not healthy after $UP_SECONDS s"
    sleep 0.5
  done
}

# require_confined SERVICE USER RESTART: what the engine and the kernel say of its containers.
require_confined() {
  local one seen settings expected
  settings='read-only {{.HostConfig.ReadonlyRootfs}}, without {{.HostConfig.CapDrop}}, {{.HostConfig.SecurityOpt}},'
  settings+=' {{.HostConfig.PidsLimit}} processes, memory limited {{gt .HostConfig.Memory 0}},'
  settings+=' {{.HostConfig.LogConfig.Type}} {{.HostConfig.LogConfig.Config}},'
  settings+=' restart {{.HostConfig.RestartPolicy.Name}}:{{.HostConfig.RestartPolicy.MaximumRetryCount}}'
  expected="user $2, read-only true, without [ALL], [no-new-privileges:true], 4096 processes, memory limited true,"
  expected+=" json-file map[max-file:5 max-size:10m], restart $3"
  for one in $(container "$1"); do
    seen="user $(docker exec "$one" stat -c %u:%g /proc/1), $(docker inspect --format "$settings" "$one")"
    [ "$seen" = "$expected" ] || fail "container of $1: $seen; expected: $expected"
    docker exec "$one" cat /proc/1/status > "$work/process"
    for line in 'CapEff:[[:space:]]*0*$' 'CapBnd:[[:space:]]*0*$' 'NoNewPrivs:[[:space:]]*1$'; do
      grep -q "^$line" "$work/process" || { cat "$work/process" >&2; fail "container of $1: its process may gain rights"; }
    done
  done
  say "$1: $seen"
}

# require_redis_kept: Redis has left out nothing of its append-only file.
require_redis_kept() {
  if logged redis CRITICAL; then
    grep CRITICAL "$work/logs" | tail -n 1 >&2
    fail "Redis skipped a part of its append-only file"
  fi
}

# keep_checkpoint FOLDER: copies the checkpoints out of the volume of runs.
keep_checkpoint() {
  mkdir "$1"
  compose run --rm --no-deps -T master tar -C /runs/checkpoints -c . 2>"$work/run.log" | tar -x -C "$1" || {
    cat "$work/run.log" >&2
    fail "no checkpoints in the volume"
  }
  chmod -R a+rX "$1"
}

# wait_for_middle [AFTER]: returns once more versions than AFTER are committed, or a quarter of all; leaves the version in
# $reached and the total in $versions.
wait_for_middle() {
  local seen version deadline=$((SECONDS + UP_SECONDS))
  while [ "$SECONDS" -lt "$deadline" ]; do
    if [ "$up" ] && ! kill -0 "$up" 2>/dev/null; then
      tail -n 60 "$work/up.log" >&2
      fail "up ended before the middle of the job"
    fi
    seen=$(job_status "$(container master)" 2>"$work/status.log") || { require_master; sleep 1; continue; }
    version=$(field version <<<"$seen")
    versions=$(field versions_total <<<"$seen")
    if [ "$versions" -gt 0 ] && [ "$version" -gt "${1:-$((versions / 4))}" ]; then
      reached=$version
      say "version $version of $versions, $("$PYTHON" -c '
import json, sys
print(*("{host} did {micro_batches}".format(**worker) for worker in json.load(sys.stdin)["workers"]), sep=", ")' <<<"$seen")"
      [ "$version" -lt "$versions" ] || fail "the job was over before a worker could be killed; make it longer"
      return
    fi
    sleep 1
  done
  cat "$work/status.log" >&2
  fail "the job did not get to its middle within $UP_SECONDS s"
}

# keep_result FILE STORES: copies result.json out of the volume of runs, and checks what it says.
keep_result() {
  compose run --rm --no-deps -T master cat /runs/latest/result.json > "$1" 2>"$work/run.log" || {
    cat "$work/run.log" >&2
    fail "no result.json in the volume"
  }
  say "result: $("$PYTHON" -c 'import json, sys; print(json.dumps(json.load(sys.stdin)))' < "$1")"
  "$PYTHON" - "$1" "$MIN_AUC" "$versions" "$2" <<'PY' || fail "the result is not what it should be"
import json, sys

result, least, versions = json.load(open(sys.argv[1])), float(sys.argv[2]), int(sys.argv[3])
assert result["auc"] >= least, f"auc {result['auc']} is below {least}"
assert result["version"] == versions, f"version {result['version']}, expected {versions}"
stores = {server["store"] for server in result["store_servers"]}
assert len(stores) == int(sys.argv[4]), f"rows were in {stores}, expected {sys.argv[4]} stores"
assert all(store.startswith("redis://") for store in stores), f"rows were in {stores}, not in Redis"
PY
}

# crowd CONTAINER: calls of a stranger that say nothing, more than the server takes, until "$work/enough" is there.
crowd() {
  docker exec --interactive "$1" timeout "$UP_SECONDS" python - <<'PY'
import sys, time
import grpc

def silent():
    time.sleep(3600)
    yield b""

calls = []
with grpc.insecure_channel("127.0.0.1:50051") as channel:
    for method in ("GetStoreStatus", "LookupSmall", "Lookup"):
        call = channel.stream_unary(f"/elastable.embedding_store.v1.Store/{method}", None, None)
        calls += [call.future(silent()) for _ in range(150)]
    print("crowded", flush=True)
    time.sleep(30)
PY
}

# make_certificates FOLDER: as docs/security.md has it.
make_certificates() {
  local key=(-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes)
  mkdir "$1"
  (
    cd "$1"
    openssl req -x509 "${key[@]}" -days 2 -subj "/CN=compose-test" -keyout ca.key -out ca.pem
    openssl req "${key[@]}" -subj "/CN=elastable" -keyout key.pem -out request.pem
    printf 'subjectAltName=DNS:master,DNS:localhost,IP:127.0.0.1\n' > names
    openssl x509 -req -in request.pem -CA ca.pem -CAkey ca.key -CAcreateserial -days 2 -extfile names -out cert.pem
    openssl rand -hex 32 > token
    openssl rand -hex 32 > worker-token
    rm ca.key
    chmod a+rX . ./*
  ) > "$work/openssl.log" 2>&1 || { cat "$work/openssl.log" >&2; fail "no certificates"; }
}

# restart CONTAINER: as `docker-compose restart` and Kubernetes do it; the job goes on.
restart() {
  docker restart "$1" >/dev/null
  say "restarted $(docker inspect --format '{{.Name}}' "$1") at version $reached"
  wait_until_healthy "$1"
  wait_for_middle "$((reached + 2))"
}

say "engine $(docker version --format '{{.Server.Version}}'), $("${COMPOSE[@]}" version --short)"
for image in "$PYTHON_IMAGE" "$REDIS_IMAGE"; do
  docker image inspect "$image" >/dev/null 2>&1 || timeout 300 docker pull --quiet "$image" 2>"$work/pull.log" || {
    say "$image is neither here nor can it be pulled"
    timeout 900 deploy/base-images.sh
  }
done
say "building the image"
timeout 1500 "${COMPOSE[@]}" --project-name "$PROJECT" build > "$work/build.log" 2>&1 || {
  tail -n 40 "$work/build.log" >&2
  fail "the image was not built"
}
[ "$(docker run --rm "$ELASTABLE_IMAGE" id -u)" -ne 0 ] || fail "the image runs as root"

say "image: $(docker image inspect --format '{{.Size}}' "$ELASTABLE_IMAGE") bytes"

say "1. two workers, one container killed in the middle"
# With file systems that can be written to, for once: what is compiled there shows.
cat > "$work/writable.yml" <<'YML'
services:
  store: {read_only: false}
  master: {read_only: false}
  worker: {read_only: false}
YML
export COMPOSE_FILE=docker-compose.yml:$work/writable.yml
compose up --detach > "$work/up.log" 2>&1 || { cat "$work/up.log" >&2; fail "up --detach"; }
master=$(container master)
mapfile -t workers < <(container worker)
[ "${#workers[@]}" -eq 2 ] || fail "${#workers[@]} workers started by default, expected 2"
wait_for_middle
docker kill "${workers[0]}" >/dev/null
say "killed worker container ${workers[0]:0:12}"
wait_for_end "$master"
[ "$(exit_code "${workers[0]}")" -eq 137 ] || fail "the killed worker had ended by itself: exit code $(exit_code "${workers[0]}")"
code=$(timeout 120 docker wait "${workers[1]}") || fail "the other worker did not end"
[ "$code" -eq 0 ] || fail "the other worker ended with exit code $code"
no_kernel_compiled "$master" "${workers[1]}" "$(container store)"
if compose logs --no-color | grep -E 'oneDNN|absl::InitializeLog'; then fail "TensorFlow's chatter reaches the logs"; fi
keep_result "$work/killed.json" 1
unset COMPOSE_FILE

say "2. up once more, Redis and then the master killed in the middle"
compose up --detach > "$work/up.log" 2>&1 || { cat "$work/up.log" >&2; fail "up --detach, once more"; }
wait_for_middle
require_confined redis 999:999 on-failure:0
require_confined store 10001:10001 on-failure:5
require_confined master 10001:10001 on-failure:5
require_confined worker 10001:10001 no:0
docker kill "$(container redis)" >/dev/null
redis_killed=yes
say "killed Redis at version $reached"
mapfile -t workers < <(container worker)
docker pause "${workers[@]}" >/dev/null # or the job may be over before the next step sees where it is
compose up --detach --no-recreate redis > "$work/up.log" 2>&1 || { cat "$work/up.log" >&2; fail "up --detach redis"; }
docker unpause "${workers[@]}" >/dev/null
wait_for_middle "$((reached + 2))"
require_redis_kept
docker kill "$(container master)" >/dev/null
say "killed the master at version $reached"
compose up --detach --no-recreate > "$work/up.log" 2>&1 || { cat "$work/up.log" >&2; fail "up --detach after the kill"; }
wait_for_end "$(container master)"
# `up` leaves a container alone that still runs: the next one must find workers that have ended.
for worker in "${workers[@]}"; do
  code=$(timeout 120 docker wait "$worker") || fail "worker ${worker:0:12} did not end"
  [ "$code" -eq 0 ] || fail "worker ${worker:0:12} ended with exit code $code"
done
redis_killed=
logged master 'resuming at version' || fail "the master did not resume"
keep_result "$work/restarted.json" 1

say "3. master, Redis and their volumes lost in the middle; the workers join the job that takes their place"
compose up --detach > "$work/up.log" 2>&1 || { cat "$work/up.log" >&2; fail "up --detach, a third time"; }
wait_for_middle
mapfile -t workers < <(container worker)
docker kill "$(container master)" "$(container redis)" >/dev/null
compose rm --force --stop -v master redis > "$work/rm.log" 2>&1 || { cat "$work/rm.log" >&2; fail "rm master redis"; }
docker volume rm "${PROJECT}_redis" >/dev/null || fail "the volume of Redis is in use"
compose run --rm --no-deps -T --entrypoint sh master -c 'rm -r /runs/*' > "$work/run.log" 2>&1 || fail "the runs stay"
say "lost at version $reached"
compose up --detach --no-recreate > "$work/up.log" 2>&1 || { cat "$work/up.log" >&2; fail "up --detach after the loss"; }
wait_for_middle
[ "$(container worker | sort | xargs)" = "$(printf '%s\n' "${workers[@]}" | sort | xargs)" ] ||
  fail "the worker containers are others"
logged worker 'the master runs another job now' || fail "no worker was of another job"
master=$(container master)
: > "$work/crowd.log"
crowd "$master" > "$work/crowd.log" 2>&1 &
until grep -q crowded "$work/crowd.log"; do
  kill -0 $! 2>/dev/null || { cat "$work/crowd.log" >&2; fail "no crowd"; }
  sleep 0.2
done
docker exec "$master" master-health.py 127.0.0.1:50051 || fail "a crowded master does not answer its health check"
wait_for_end "$master"
keep_result "$work/another.json" 1
compose down --volumes --timeout 5 > "$work/down.log" 2>&1 || { cat "$work/down.log" >&2; fail "down --volumes"; }

say "4. three store servers, four workers, up --exit-code-from master, one worker process killed"
timeout "$UP_SECONDS" "${COMPOSE[@]}" --project-name "$PROJECT" up --exit-code-from master --scale store=3 \
  --scale worker=4 > "$work/up.log" 2>&1 &
up=$!
wait_for_middle
victim=$(container worker | sed -n 1p)
docker exec "$victim" sh -c 'kill -KILL "$(cat /tmp/worker.pid)"'
say "killed the process of worker ${victim:0:12}"
wait "$up" || { code=$?; tail -n 60 "$work/up.log" >&2; fail "up --exit-code-from master ended with exit code $code"; }
grep -q 'starting it again' "$work/up.log" || fail "the killed worker process was not started again"
mapfile -t workers < <(compose ps --all --quiet worker 2>/dev/null || container worker)
[ "${#workers[@]}" -eq 4 ] || fail "${#workers[@]} workers, expected 4"
for worker in "${workers[@]}"; do
  [ "$worker" != "$victim" ] || continue # stopped in whatever it does if the master ends before it is back
  [ "$(exit_code "$worker")" -eq 0 ] || fail "worker ${worker:0:12} ended with exit code $(exit_code "$worker")"
done
keep_result "$work/four.json" 3

compose down --volumes --timeout 5 > "$work/down.log" 2>&1 || { cat "$work/down.log" >&2; fail "down --volumes"; }
secrets=()
if command -v openssl >/dev/null; then
  say "5. two store servers, two workers, over mutual TLS with tokens, undisturbed"
  make_certificates "$work/tls"
  export COMPOSE_FILE=docker-compose.yml:deploy/tls.yml ELASTABLE_TLS_DIR=$work/tls
  secrets=(ELASTABLE_TOKEN_FILE ELASTABLE_TLS_CERT)
else
  say "5. two store servers, two workers, undisturbed; without TLS, as there is no openssl to make certificates with"
fi
timeout "$UP_SECONDS" "${COMPOSE[@]}" --project-name "$PROJECT" up --exit-code-from master --scale store=2 \
  > "$work/up.log" 2>&1 &
up=$!
wait_for_middle
for dropped in "${secrets[@]}"; do
  for server in "$(container master) 50051" "$(container store | sed -n 1p) 50061"; do
    without=(--env "$dropped=")
    [ "$dropped" != ELASTABLE_TLS_CERT ] || without+=(--env ELASTABLE_TLS_KEY=)
    [ "$dropped" != ELASTABLE_TOKEN_FILE ] || without+=(--env ELASTABLE_WORKER_TOKEN_FILE=)
    if docker exec "${without[@]}" "${server% *}" elastable lookup on_weekday 0 --master "127.0.0.1:${server#* }" \
      --deadline 5 > "$work/refused.log" 2>&1; then
      fail "a client without $dropped was answered at port ${server#* }"
    fi
    grep -qE 'shows no token|cannot be reached' "$work/refused.log" || { cat "$work/refused.log" >&2; fail "another error"; }
    say "without $dropped: $(tail -n 1 "$work/refused.log")"
  done
done
wait "$up" || { code=$?; tail -n 60 "$work/up.log" >&2; fail "the master ended with exit code $code"; }
up=
keep_result "$work/undisturbed.json" 2
keep_checkpoint "$work/undisturbed"
unset COMPOSE_FILE ELASTABLE_TLS_DIR

say "6. three store servers, one killed in the middle; a rolling restart of every container"
compose down --volumes --timeout 5 > "$work/down.log" 2>&1 || { cat "$work/down.log" >&2; fail "down --volumes"; }
compose up --detach --scale store=3 > "$work/up.log" 2>&1 || { cat "$work/up.log" >&2; fail "up --scale store=3"; }
mapfile -t stores < <(container store)
[ "${#stores[@]}" -eq 3 ] || fail "${#stores[@]} store servers, expected 3"
wait_for_middle 20 # what follows takes versions
docker kill "${stores[1]}" >/dev/null
say "killed store server ${stores[1]:0:12} at version $reached"
docker start "${stores[1]}" >/dev/null
wait_until_healthy "${stores[1]}"
wait_for_middle "$((reached + 2))"
for one in $(container redis) "${stores[@]}" $(container worker) $(container master); do restart "$one"; done
require_redis_kept
wait_for_end "$(container master)"
logged master "resuming at version" || fail "the master did not resume"
keep_result "$work/rolled.json" 3
keep_checkpoint "$work/rolled"
for kept in undisturbed rolled; do
  last=$(find "$work/$kept" -maxdepth 1 -name 'ckpt-*' -printf '%f\n' | sort | tail -n 1)
  [ "$last" = "$(printf 'ckpt-%010d' "$versions")" ] || fail "the last checkpoint of the $kept job is $last"
done
docker run --rm --network none -v "$work/undisturbed:/one:ro" -v "$work/rolled:/other:ro" "$ELASTABLE_IMAGE" \
  elastable checkpoint diff "/one/$last" "/other/$last" > "$work/diff.log" 2>&1 || {
  tail -n 40 "$work/diff.log" >&2
  fail "the checkpoints differ"
}
say "checkpoint $last: $(tail -n 1 "$work/diff.log")"

say "7. a master that cannot begin"
compose down --volumes --timeout 5 > "$work/down.log" 2>&1 || { cat "$work/down.log" >&2; fail "down --volumes"; }
if ELASTABLE_MODEL=examples/none.py timeout "$UP_SECONDS" "${COMPOSE[@]}" --project-name "$PROJECT" \
  up --exit-code-from master > "$work/up.log" 2>&1; then
  fail "up ended well without a model file"
else
  code=$?
fi
[ "$code" -ne 124 ] || fail "up did not end within $UP_SECONDS s"
logged master 'no such model file' || fail "the master does not say why it ended"
say "up ended with exit code $code"

"$PYTHON" - "$work/killed.json" "$work/restarted.json" "$work/another.json" "$work/four.json" "$work/undisturbed.json" \
  "$work/rolled.json" <<'PY' || fail "the trainings differ"
import json, sys

killed, *others = (json.load(open(path)) for path in sys.argv[1:])
whats = ("with Redis and the master killed", "begun anew", "with four workers", "undisturbed", "with a rolling restart")
for what, other in zip(whats, others, strict=True):
    for name in ("auc", "version"):
        assert killed[name] == other[name], f"{name}: {killed[name]!r} with a worker killed, {other[name]!r} {what}"
PY
say "passed in $SECONDS s"
