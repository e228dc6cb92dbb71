"""Chromium of the distribution, driven by Selenium, and a site to visit. Selenium is imported when it is used."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from tests.support.polling import eventually
from tests.support.processes import free_port

__all__ = ["Browser", "running_browser", "running_site"]

DRIVER, BROWSER = "/usr/bin/chromedriver", "/usr/bin/chromium"


@contextmanager
def running_site(app: ASGIApp) -> Iterator[str]:
    """Serve an ASGI app from a thread. Yields its address."""
    port = free_port()
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        eventually(lambda: server.started, 10)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()


@contextmanager
def running_browser(*, scripts: bool = True) -> Iterator[Browser]:
    """Start a browser of its own, with or without JavaScript."""
    from selenium import webdriver  # noqa: PLC0415
    from selenium.webdriver.chrome.service import Service  # noqa: PLC0415

    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1280,900"):
        options.add_argument(argument)
    if not scripts:
        options.add_experimental_option("prefs", {"profile.managed_default_content_settings.javascript": 2})
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    try:
        yield Browser(driver)
    finally:
        driver.quit()


class Browser:
    """A running browser: the steps that tests take in it."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, address: str) -> Browser:
        self.driver.get(address)
        return self

    def all(self, selector: str) -> list[Any]:
        return list(self.driver.find_elements("css selector", selector))

    def one(self, selector: str) -> Any:
        return self.driver.find_element("css selector", selector)

    def text(self, selector: str = "main") -> str:
        """Return the text of the first element; "" while there is none, or while the next page replaces it."""
        from selenium.common.exceptions import StaleElementReferenceException, WebDriverException  # noqa: PLC0415

        try:
            return "".join(str(one.text) for one in self.all(selector)[:1])
        except WebDriverException as error:
            # Chromium has two ways to say that the element belongs to the page before.
            if isinstance(error, StaleElementReferenceException) or "not belong to the document" in str(error):
                return ""
            raise

    def click(self, selector: str) -> None:
        """Click. What comes of it may take a moment."""
        self.one(selector).click()

    def confirm(self) -> str:
        """Answer yes to a question. Return its text."""
        alert = eventually(self._alert, 5)
        text = str(alert.text)
        alert.accept()
        return text

    def _alert(self) -> Any:
        from selenium.common.exceptions import NoAlertPresentException  # noqa: PLC0415

        try:
            return self.driver.switch_to.alert
        except NoAlertPresentException:
            return None

    def press(self, *keys: str) -> None:
        from selenium.webdriver import ActionChains  # noqa: PLC0415

        for key in keys:
            ActionChains(self.driver).send_keys(key).perform()

    def run(self, script: str) -> Any:
        return self.driver.execute_script(script)

    def narrow(self, width: int, height: int = 800) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def wide(self) -> None:
        self.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})

    def scheme(self, name: str) -> None:
        """Prefer "dark" or "light"."""
        features = [{"name": "prefers-color-scheme", "value": name}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def violations(self) -> list[str]:
        """Return what axe-core finds wrong with the page, as rules and elements."""
        script = files("axe_playwright_python").joinpath("axe.min.js").read_text()
        # The driver's own scripts do not need the permission of the page's policy.
        self.driver.execute_script(script)
        found = self.driver.execute_async_script("axe.run().then(arguments[0])")
        return [f"{one['id']}: {node['html']}" for one in found["violations"] for node in one["nodes"]]

    def errors(self) -> list[str]:
        """Return the errors that the browser logged since the last call."""
        return [one["message"] for one in self.driver.get_log("browser") if one["level"] == "SEVERE"]
