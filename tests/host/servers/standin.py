"""A stand-in for SGLang, for timing and crashes only: its log lines and /ready, nothing computed.

It is put at hsx_capture/launch.py of a test's folder. --load S: seconds of loading; --crash loading|serving:
the scheduler's fatal line, then the process lingers with its port open, as SGLang does; --die: exit while
loading; --stubborn: ignores TERM and INT; --prompt TEXT: a logged request.
"""

import argparse
import http.server
import json
import os
import signal
import sys
import time

p = argparse.ArgumentParser()
p.add_argument("--port", type=int, required=True)
p.add_argument("--model-path", default="/models/tiny")
p.add_argument("--api-key")
p.add_argument("--load", type=float, default=0.0)
p.add_argument("--crash")
p.add_argument("--die", action="store_true")
p.add_argument("--stubborn", action="store_true")
p.add_argument("--prompt")
args = p.parse_args()


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def log(text: str) -> None:
    say(time.strftime("[%Y-%m-%d %H:%M:%S] ") + text)


if args.stubborn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
else:
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
log("server_args=ServerArgs(...)")
log("Load weight begin. avail mem=1 GB")
if args.die:
    sys.exit("no such model")
if args.crash == "loading":
    log("Scheduler hit an exception: Traceback (most recent call last): boom")
    time.sleep(60)
time.sleep(args.load)
log("Load weight end. elapsed=0.06 s")
log("Engine startup timings (s): load_weight=0.06")


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        info = {"model_path": args.model_path, "version": "0.0", "api_key": args.api_key}
        body = json.dumps(info if self.path == "/server_info" else {}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


server = http.server.ThreadingHTTPServer(("127.0.0.1", args.port), Handler)
log("Application startup complete.")
if args.prompt:
    log("Receive: text=" + args.prompt)
    say(args.prompt)
log("The server is fired up and ready to roll!")
if args.crash == "serving":
    log("Scheduler hit an exception: Traceback (most recent call last): boom")
server.serve_forever()
