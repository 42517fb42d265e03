"""`stoker launch`: start a coding agent (Codex, Claude Code, OpenCode) with a gateway of this project as its model provider."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from stoker.base.errors import ConfigError
from stoker.base.output import print_message, print_result

NAME = "launch"
HELP = "start codex, claude or opencode with this server's model"
DESCRIPTION = """Start a coding agent that is installed on this machine, with a gateway or a worker as its model provider: codex,
claude (Claude Code) or opencode. The agent's own configuration files are not changed. Arguments after -- go to the agent:
`stoker launch --url http://gateway:8000 codex -- exec "fix the tests"`."""

KEY_VARIABLE = "STOKER_API_KEY"
_NO_KEY = "none"  # agents insist on a key
_TIMEOUT_S = 10.0
_INSTALL = {
    "codex": "npm install -g @openai/codex",
    "claude": "npm install -g @anthropic-ai/claude-code",
    "opencode": "npm install -g opencode-ai",
}


@dataclass(frozen=True, slots=True)
class AgentServer:
    """The server that an agent is pointed at."""

    url: str  # without /v1
    model: str
    context_tokens: int | None  # None: not known
    key: str | None


@dataclass(frozen=True, slots=True)
class AgentLaunch:
    """What an agent is started with."""

    arguments: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    config: str | None = None  # the text of a file
    config_variable: str = ""  # the variable that holds the file's path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = DESCRIPTION
    parser.add_argument("tool", metavar="TOOL", help="The agent: codex, claude or opencode.")
    parser.add_argument(
        "arguments", nargs="*", default=[], metavar="ARGUMENT", help="Arguments of the agent, after --."
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="Address of the server. Default: %(default)s.")
    parser.add_argument("--model", help="Model name. Default: the first model that the server lists.")
    parser.add_argument(
        "--api-key",
        default=os.environ.get(KEY_VARIABLE),
        help=f"API key. Default: the environment variable {KEY_VARIABLE}.",
    )
    parser.add_argument("--print", action="store_true", help="Print the configuration and start nothing.")


def run(args: argparse.Namespace) -> int:
    from stoker.up.state import default_state_dir

    makers = {"codex": codex_launch, "claude": claude_launch, "opencode": opencode_launch}
    if args.tool not in makers:
        raise ConfigError(f"TOOL {args.tool!r} is not known; give one of: {', '.join(makers)}")
    path = shutil.which(args.tool)
    if path is None and not args.print:
        raise ConfigError(
            f"{args.tool} is not installed, or not on PATH: install it with `{_INSTALL[args.tool]}`, or see its "
            f"configuration with `stoker launch {args.tool} --print`"
        )
    server = find_server(args.url, args.model, (args.api_key or "").strip() or None)
    launch = makers[args.tool](server)
    if args.print:
        print_result(printed(args.tool, launch, args.arguments))
        return 0
    assert path is not None
    environment = {**os.environ, **launch.environment}
    if launch.config is not None:
        environment[launch.config_variable] = str(_write(default_state_dir(os.environ), args.tool, launch.config))
    print_message(f"stoker: {args.tool} uses {server.model} at {server.url}", sys.stderr)
    return _replace_process(path, [args.tool, *launch.arguments, *args.arguments], environment)


def _replace_process(path: str, words: list[str], environment: dict[str, str]) -> NoReturn:
    try:
        os.execve(path, words, environment)
    except OSError as error:
        raise ConfigError(f"{path} cannot be started: {error}") from error


def find_server(url: str, model: str | None, key: str | None) -> AgentServer:
    """Ask the server for its models. A server that does not answer is an error, unless the model is given."""
    url = url.rstrip("/").removesuffix("/v1")
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"--url {url!r} must begin with http:// or https://")
    request = urllib.request.Request(f"{url}/v1/models", headers={"Authorization": f"Bearer {key or _NO_KEY}"})
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
            cards = json.loads(answer.read())["data"]
            lengths = {str(card["id"]): card.get("max_model_len") for card in cards}
    except urllib.error.HTTPError as error:
        hint = f"; give the key with --api-key or {KEY_VARIABLE}" if error.code == 401 else ""
        raise ConfigError(f"{url}/v1/models answered with status {error.code}{hint}") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        if model is None:
            raise ConfigError(
                f"--url {url}: no server answers there ({error}); start one with `stoker up`, or give --model"
            ) from error
        lengths = {}
    if model is None and not lengths:
        raise ConfigError(f"{url} serves no model yet; wait for its workers, or give --model")
    chosen = model or next(iter(lengths))
    if lengths and chosen not in lengths:
        raise ConfigError(f"--model {chosen!r} is not served at {url}; it serves: {', '.join(lengths)}")
    return AgentServer(url, chosen, lengths.get(chosen), key)


def claude_launch(server: AgentServer) -> AgentLaunch:
    """Claude Code reads its provider from the environment."""
    names = ("MODEL", "SMALL_FAST_MODEL", "DEFAULT_OPUS_MODEL", "DEFAULT_SONNET_MODEL", "DEFAULT_HAIKU_MODEL")
    environment = {f"ANTHROPIC_{name}": server.model for name in names}
    environment |= {
        "ANTHROPIC_BASE_URL": server.url,
        "ANTHROPIC_AUTH_TOKEN": server.key or _NO_KEY,
        "ANTHROPIC_API_KEY": "",  # a key for Anthropic's own servers must not be sent here
        "CLAUDE_CODE_SUBAGENT_MODEL": server.model,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    return AgentLaunch(environment=environment)


def codex_launch(server: AgentServer) -> AgentLaunch:
    """Codex takes every key of its config.toml as an argument."""
    settings: dict[str, str | int] = {
        "model": server.model,
        "model_provider": "stoker",
        "model_providers.stoker.name": "Stoker",
        "model_providers.stoker.base_url": f"{server.url}/v1",
        "model_providers.stoker.env_key": KEY_VARIABLE,
        "model_providers.stoker.wire_api": "responses",
    }
    if server.context_tokens is not None:
        settings["model_context_window"] = server.context_tokens
    # JSON's texts and numbers are TOML's too.
    arguments = [word for name, value in settings.items() for word in ("-c", f"{name}={json.dumps(value)}")]
    return AgentLaunch(arguments=arguments, environment={KEY_VARIABLE: server.key or _NO_KEY})


def opencode_launch(server: AgentServer) -> AgentLaunch:
    """OpenCode reads an additional configuration file that a variable names."""
    model: dict[str, object] = {"name": server.model}
    if server.context_tokens is not None:
        model["limit"] = {"context": server.context_tokens, "output": server.context_tokens // 4}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "Stoker",
        "options": {"baseURL": f"{server.url}/v1", "apiKey": f"{{env:{KEY_VARIABLE}}}"},
        "models": {server.model: model},
    }
    config = {"model": f"stoker/{server.model}", "provider": {"stoker": provider}}
    return AgentLaunch(
        environment={KEY_VARIABLE: server.key or _NO_KEY},
        config=json.dumps(config, indent=2) + "\n",
        config_variable="OPENCODE_CONFIG",
    )


def printed(tool: str, launch: AgentLaunch, arguments: Sequence[str]) -> str:
    """Return the launch as a shell script. It takes the key from the environment."""
    lines = []
    if launch.config is not None:
        lines += ["cat > stoker-opencode.json <<'END'", launch.config.rstrip("\n"), "END"]
        lines.append(f'export {launch.config_variable}="$PWD/stoker-opencode.json"')
    for name, value in launch.environment.items():
        is_key = name in (KEY_VARIABLE, "ANTHROPIC_AUTH_TOKEN")
        lines.append(f"export {name}=" + (f'"${{{KEY_VARIABLE}:-{_NO_KEY}}}"' if is_key else shlex.quote(value)))
    lines.append(shlex.join([tool, *launch.arguments, *arguments]))
    return "\n".join(lines)


def _write(state_dir: Path, tool: str, text: str) -> Path:
    path = state_dir / "launch" / f"{tool}.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error}") from error
    return path
