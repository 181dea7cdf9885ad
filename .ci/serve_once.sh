#!/usr/bin/env bash
# `make serve` as a stranger types it, one answer, and SIGTERM. Usage: .ci/serve_once.sh (in a clone).
set -euo pipefail
port=${PORT:-30555}
make -s serve PORT="$port" PYTHON="${PYTHON:-python3}" 2>serve.err &
pid=$!
trap 'kill $pid 2>/dev/null || true' EXIT
for _ in $(seq 600); do
  grep -q "answers at" serve.err && break
  kill -0 $pid 2>/dev/null || { cat serve.err; exit 1; }
  sleep 0.5
done
.venv/bin/k3 chat --base-url "http://127.0.0.1:$port" --max-tokens 20 Hello | head -c 300
# make's child is the server; it drains and exits by itself.
kill -TERM "$(pgrep -P $pid)"
wait $pid || true
trap - EXIT
! curl -sf -m 2 "http://127.0.0.1:$port/health" >/dev/null
