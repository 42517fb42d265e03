"""Header names and paths of the HTTP interface between gateways and their workers. Clients use none of them."""

from __future__ import annotations

# Every header that starts with this prefix is internal: the gateway removes it from what clients and workers send.
INTERNAL_HEADER_PREFIX = "x-stoker-"

# "1" asks a worker to write resume notes into its stream (see resume_notes.py).
NOTES_HEADER = "x-stoker-stream"
NOTES_WANTED = "1"
# The name under which the gateway can move this request to another worker (see moves.py).
MOVE_HEADER = "x-stoker-move"
# With --debug-routes, the gateway explains its choice of a worker to the client in this header.
ROUTE_HEADER = "x-stoker-route"

# Served by the gateway: a worker announces itself with POST and leaves with DELETE (`WorkerRegistration`).
REGISTER_PATH = "/stoker/register"

# Served by workers.
READY_PATH = (
    "/ready"  # GET: 200 if the worker takes requests, open to all, but the answer to a signed request has a proof
)
WORKER_INFO_PATH = "/stoker/worker"  # GET: `WorkerInfo`
TOKENIZER_PATH = "/stoker/tokenizer"  # GET: `TokenizerFiles`
PREFETCH_PATH = "/stoker/prefetch"  # POST: `PrefetchRequest`
RELEASE_PATH = "/stoker/release"  # POST: `ReleaseRequest`
MOVE_PATH = "/stoker/move"  # POST: `MoveRequest`
DUTY_PATH = "/stoker/duty"  # POST: `DutyRequest`, answered with `WorkerDuty`
MODEL_PATH = "/stoker/model"  # POST: `ModelRequest`, answered with `ModelSwitched`

# The endpoints that generate, served by both.
CHAT_PATH = "/v1/chat/completions"
COMPLETIONS_PATH = "/v1/completions"
MESSAGES_PATH = "/v1/messages"
RESPONSES_PATH = "/v1/responses"
INPUT_TOKENS_PATH = "/v1/responses/input_tokens"  # this and the next: count the tokens of a prompt
COUNT_TOKENS_PATH = "/v1/messages/count_tokens"
