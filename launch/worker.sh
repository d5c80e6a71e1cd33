# The startup script of every worker, after what is set above it:
# role, index, generators, mount, nfs, state, mark, image, port, restarts,
# grace, command.
# The machine runs it at every boot, so after maintenance the run goes on.
set -euo pipefail

ask() {
  curl --silent --fail --header 'Metadata-Flavor: Google' \
    "http://metadata.google.internal/computeMetadata/v1/instance/$1"
}

mkdir -p "$mark" # Of this machine: what it has been through already.
if [ -e "$mark/ended" ]; then
  exit 0
fi

if ! mountpoint --quiet "$mount"; then
  if ! command -v mount.nfs > /dev/null; then
    apt-get update --quiet
    apt-get install --quiet --yes nfs-common
  fi
  mkdir -p "$mount"
  mount -t nfs -o hard "$nfs" "$mount"
fi
mkdir -p "$state/generators"

worker=$(ask attributes/agent-worker-number)
slice=$(ask attributes/tpu-env | sed -n "s/^MEGASCALE_SLICE_ID: *'\([0-9]*\)'.*/\1/p")
leads=false
if [ "$role" = trainer ] && [ "$worker" = 0 ] && [ "${slice:-0}" = 0 ]; then
  leads=true
fi
if $leads && [ ! -e "$mark/begun" ]; then
  rm -f "$state"/{addresses,ended,stop} "$state"/generators/*
fi
touch "$mark/begun"

# Each generator says where it is; one machine makes the trainer's list of it.
address=$(ask network-interfaces/0/ip):$port
keep_addresses() {
  while true; do
    if [ "$role" = generator ]; then
      echo "$address" > "$state/generators/$index"
    elif cat "$state"/generators/* > "$state/addresses.new" 2> /dev/null; then
      mv "$state/addresses.new" "$state/addresses"
    fi
    sleep 15
  done
}
if [ "$role" = generator ] || $leads; then
  keep_addresses &
  keeper=$!
  trap 'kill "$keeper"' EXIT
fi
until [ "$role" = generator ] || [ "$generators" = 0 ] ||
  [ -s "$state/addresses" ]; do
  sleep 5
done

case "$image" in
  *.pkg.dev/* | gcr.io/* | *.gcr.io/*)
    gcloud auth configure-docker "${image%%/*}" --quiet
    ;;
esac
docker pull "$image"

# 0 is the end, and 2 is what the run refuses; SIGTERM ends it for good only if
# somebody asked for that.
attempts=0
while true; do
  docker rm --force rl_tpu > /dev/null 2>&1 || true
  code=0
  docker run --name=rl_tpu --network=host --privileged \
    --stop-timeout="$grace" --volume="$mount:$mount" \
    "$image" "${command[@]}" || code=$?
  attempts=$((attempts + 1))
  if [ "$code" = 0 ] || [ "$code" = 2 ] || [ -e "$state/stop" ] ||
    [ "$attempts" -gt "$restarts" ]; then
    break
  fi
done
touch "$mark/ended"
if $leads; then
  echo "$code" > "$state/ended"
fi
