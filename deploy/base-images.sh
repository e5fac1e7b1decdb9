#!/usr/bin/env bash
# Builds the two base images of docker-compose.yml from Debian packages, for a machine that reaches a Debian mirror but
# no image registry:
#
#   python:3.11-slim   Debian 12 with its Python 3.11, pip and venv under the names of the official image
#   redis:7            Debian 12 with its Redis 7.0
#
# An image that the engine already has is left alone. Needs root, debootstrap and an answering Docker engine. The mirror
# is the one that this machine's apt uses (DEBIAN_MIRROR overrides it), and the certificates that this machine trusts
# become those that the images trust (CA_BUNDLE overrides them).
set -euo pipefail

SUITE=bookworm
PYTHON_IMAGE=${PYTHON_IMAGE:-python:3.11-slim}
REDIS_IMAGE=${REDIS_IMAGE:-redis:7}

fail() {
  echo "base-images: $*" >&2
  exit 1
}

debian_mirror() {
  if [ -n "${DEBIAN_MIRROR:-}" ]; then
    echo "$DEBIAN_MIRROR"
    return
  fi
  # One line an index: the archive's address and the component. Debian's main archive ends in /debian on every mirror.
  apt-get indextargets --format '$(SITE) $(COMPONENT)' 'Created-By: Packages' 2>/dev/null |
    awk '$2 == "main" && $1 ~ /\/debian\/?$/ { print $1; exit }'
}

ca_bundle() {
  local candidate
  for candidate in "${CA_BUNDLE:-}" "${PIP_CERT:-}" "${SSL_CERT_FILE:-}" /etc/ssl/certs/ca-certificates.crt; do
    if [ -n "$candidate" ] && [ -s "$candidate" ]; then
      echo "$candidate"
      return
    fi
  done
}

# bootstrap ROOT PACKAGES: a minimal Debian with PACKAGES (comma separated) in the folder ROOT.
bootstrap() {
  local root=$1 packages=$2
  debootstrap --variant=minbase --include="$packages" "$SUITE" "$root" "$mirror" > "$root.log" 2>&1 || {
    tail -n 20 "$root.log" >&2
    fail "debootstrap of $SUITE from $mirror failed"
  }
  # The mirror's address belongs to this machine and not into an image; nor do caches and documentation.
  : > "$root/etc/apt/sources.list"
  rm -rf "$root"/var/cache/apt/* "$root"/var/lib/apt/lists/* "$root"/usr/share/{doc,man,locale}/* "$root"/var/log/*
}

# load ROOT IMAGE CHANGE...: the folder ROOT becomes IMAGE, with the given Dockerfile instructions.
load() {
  local root=$1 image=$2 options=()
  shift 2
  for change in "$@"; do options+=(--change "$change"); done
  tar --directory "$root" --numeric-owner --create . | docker import "${options[@]}" - "$image" >/dev/null
  echo "base-images: $image built"
}

python_image() {
  local root=$work/python bundle
  bootstrap "$root" ca-certificates,python3,python3-pip,python3-venv
  ln -s /usr/bin/python3.11 "$root/usr/local/bin/python"
  ln -s /usr/bin/python3.11 "$root/usr/local/bin/python3"
  ln -s /usr/bin/pip3 "$root/usr/local/bin/pip"
  # As in the official image, pip may install beside the interpreter: a container has no other owner of packages.
  rm -f "$root/usr/lib/python3.11/EXTERNALLY-MANAGED"
  bundle=$(ca_bundle)
  if [ -n "$bundle" ]; then cp "$bundle" "$root/etc/ssl/certs/ca-certificates.crt"; fi
  load "$root" "$PYTHON_IMAGE" 'ENV LANG=C.UTF-8' 'CMD ["python3"]'
}

redis_image() {
  local root=$work/redis
  bootstrap "$root" redis-server
  # The number that the official image has: docker-compose.yml names it.
  chroot "$root" groupmod --gid 999 redis
  chroot "$root" usermod --uid 999 redis
  install -d -m 0755 "$root/data"
  chroot "$root" chown redis:redis /data
  load "$root" "$REDIS_IMAGE" 'ENV LANG=C.UTF-8' 'WORKDIR /data' 'VOLUME /data' 'EXPOSE 6379' 'USER redis' 'CMD ["redis-server"]'
}

missing() { ! docker image inspect "$1" >/dev/null 2>&1; }

timeout 30 docker info >/dev/null 2>&1 || fail "no Docker engine answers (docker info); DOCKER_HOST is '${DOCKER_HOST:-}'"
if ! missing "$PYTHON_IMAGE" && ! missing "$REDIS_IMAGE"; then
  echo "base-images: $PYTHON_IMAGE and $REDIS_IMAGE are there already"
  exit 0
fi
[ "$(id -u)" -eq 0 ] || fail "needs root, as debootstrap does"
command -v debootstrap >/dev/null || fail "needs debootstrap: apt-get install debootstrap"
mirror=$(debian_mirror)
[ -n "$mirror" ] || fail "this machine's apt names no Debian mirror; set DEBIAN_MIRROR to one"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
if missing "$PYTHON_IMAGE"; then python_image; fi
if missing "$REDIS_IMAGE"; then redis_image; fi
