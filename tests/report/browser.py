"""A headless Chromium, driven over its DevTools protocol."""

import asyncio
import base64
import contextlib
import itertools
import json
import pathlib
import shutil
import subprocess

import aiohttp

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


class Page:
  """One tab; what its console complains about is kept in `complaints`."""

  def __init__(self, socket):
    self._socket = socket
    self._numbers = itertools.count(1)
    self.complaints: list[str] = []
    self._loaded = False

  async def ask(self, method: str, **parameters):
    number = next(self._numbers)
    await self._socket.send_json(
      {"id": number, "method": method, "params": parameters}
    )
    while True:
      message = await self._socket.receive_json()
      if message.get("id") == number:
        assert "error" not in message, message
        return message["result"]
      self._hear(message)

  def _hear(self, message):
    kind, said = message.get("method"), message.get("params", {})
    if kind == "Runtime.exceptionThrown":
      self.complaints.append(json.dumps(said["exceptionDetails"]))
    elif kind == "Runtime.consoleAPICalled" and said["type"] == "error":
      self.complaints.append(json.dumps(said["args"]))
    elif kind == "Log.entryAdded" and said["entry"]["level"] == "error":
      self.complaints.append(said["entry"]["text"])
    elif kind == "Page.loadEventFired":
      self._loaded = True

  async def open(self, url: str, width: int = 1280, height: int = 900):
    for domain in ("Page", "Runtime", "Log"):
      await self.ask(f"{domain}.enable")
    await self.resize(width, height)
    await self.ask("Page.navigate", url=url)
    while not self._loaded:
      self._hear(await self._socket.receive_json())

  async def resize(self, width: int, height: int = 900):
    await self.ask(
      "Emulation.setDeviceMetricsOverride",
      width=width,
      height=height,
      deviceScaleFactor=1,
      mobile=width < 600,
    )

  async def value(self, expression: str):
    """Of JavaScript; a promise's is awaited."""
    answer = await self.ask(
      "Runtime.evaluate",
      expression=expression,
      returnByValue=True,
      awaitPromise=True,
    )
    assert "exceptionDetails" not in answer, answer
    return answer["result"].get("value")

  async def press(self, key: str, code: int = 0):
    text = {"Enter": "\r"}.get(key, key if len(key) == 1 else "")
    for kind in ("keyDown", "keyUp"):
      await self.ask(
        "Input.dispatchKeyEvent",
        type=kind,
        key=key,
        windowsVirtualKeyCode=code,
        text=text if kind == "keyDown" else "",
      )

  async def picture(self, path: pathlib.Path):
    size = await self.ask("Page.getLayoutMetrics")
    content = size["cssContentSize"]
    shot = await self.ask(
      "Page.captureScreenshot",
      captureBeyondViewport=True,
      clip={
        "x": 0,
        "y": 0,
        "width": content["width"],
        "height": min(content["height"], 6000),
        "scale": 1,
      },
    )
    path.write_bytes(base64.b64decode(shot["data"]))


@contextlib.asynccontextmanager
async def page(scratch: pathlib.Path):
  """A tab of a browser that ends with the block."""
  assert BROWSER
  process = subprocess.Popen(
    [
      BROWSER,
      "--headless=new",
      "--no-sandbox",
      "--disable-gpu",
      "--no-first-run",
      "--disable-background-networking",
      "--remote-debugging-port=0",
      f"--user-data-dir={scratch}",
      "about:blank",
    ],
    stderr=subprocess.DEVNULL,
    stdout=subprocess.DEVNULL,
  )
  try:
    address = scratch / "DevToolsActivePort"
    async with asyncio.timeout(60):
      while not (address.exists() and "\n" in address.read_text()):
        assert process.poll() is None, "the browser ended"
        await asyncio.sleep(0.05)
    port = address.read_text().split()[0]
    async with aiohttp.ClientSession() as session:
      async with session.get(f"http://127.0.0.1:{port}/json") as answer:
        tabs = await answer.json()
      (url,) = [t["webSocketDebuggerUrl"] for t in tabs if t["type"] == "page"]
      async with (
        asyncio.timeout(120),
        session.ws_connect(url, max_msg_size=0) as socket,
      ):
        yield Page(socket)
  finally:
    process.kill()
    process.wait()
