#!/usr/bin/env bash
# Makes deploy/.env, from which Docker Compose takes the passwords that it asks for. Keeps one that is there.
set -euo pipefail
file="$(cd "$(dirname "$0")" && pwd)/.env"
if [ -e "$file" ]; then
  echo "$file is there already: nothing changed" >&2
  exit 0
fi
password() { od --address-radix=n --format=x1 --read-bytes=24 /dev/urandom | tr -d ' \n'; }
umask 077
cat > "$file" << END
KAFKA_PASSWORD=$(password)
DATABASE_PASSWORD=$(password)
END
echo "$file made" >&2
