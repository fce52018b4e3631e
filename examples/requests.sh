#!/bin/sh
# Talk to a running Pagemill with curl. Start `pagemill serve`, then: sh examples/requests.sh
set -eu
BASE=${PAGEMILL_URL:-http://127.0.0.1:8000}

ask() {
  path=$1
  shift
  curl --silent --show-error --fail-with-body "$BASE$path" \
    --header "Content-Type: application/json" --header "Authorization: Bearer ${PAGEMILL_API_KEY:-EMPTY}" "$@"
  echo
}

echo "# ready?" && ask /health/ready
echo "# models" && ask /v1/models
echo "# a completion" && ask /v1/completions --data '{"prompt": "The capital of France is", "max_tokens": 16, "temperature": 0}'
echo "# the simplest form" && ask /generate --data '{"prompt": "Hello, world", "max_tokens": 32}'
echo "# a chat, streamed" && ask /v1/chat/completions --no-buffer --data '{
  "messages": [{"role": "user", "content": "Name three colours."}],
  "max_completion_tokens": 64, "stream": true, "stream_options": {"include_usage": true}}'
echo "# token ids" && ask /tokenize --data '{"prompt": "Hello, world"}'
