// Three comforts; every page works without them: tables that stay fresh, copying a key, asking before an action.
"use strict";
(() => {
  const status = document.getElementById("refresh");

  function prepare(part) {
    for (const code of part.querySelectorAll("code[data-copy]")) {
      if (!navigator.clipboard) break; // only over HTTPS or on this host
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = "Copy";
      button.setAttribute("aria-label", `Copy ${code.textContent}`);
      button.addEventListener("click", async () => {
        await navigator.clipboard.writeText(code.textContent);
        button.textContent = "Copied";
      });
      code.after(" ", button);
    }
  }

  document.addEventListener("submit", (event) => {
    const question = event.submitter && event.submitter.dataset.ask;
    if (question && !window.confirm(question)) event.preventDefault();
  });

  function busy() {
    const active = document.activeElement;
    const main = document.getElementById("main");
    return document.hidden || String(document.getSelection()) !== "" || (active && active !== main && main.contains(active));
  }

  async function refresh() {
    const main = document.getElementById("main");
    if (!busy()) {
      try {
        const answer = await fetch(location.href, { redirect: "error" });
        const page = new DOMParser().parseFromString(await answer.text(), "text/html").getElementById("main");
        if (page && !busy()) {
          const left = [...main.querySelectorAll(".scroll")].map((one) => one.scrollLeft);
          main.replaceChildren(...page.childNodes);
          main.querySelectorAll(".scroll").forEach((one, index) => { one.scrollLeft = left[index] || 0; });
          prepare(main);
          status.textContent = "";
        }
      } catch {
        status.textContent = "The dashboard does not answer; this page is old.";
      }
    }
    plan();
  }

  function plan() {
    const seconds = Number(document.getElementById("main").dataset.refresh);
    if (seconds) setTimeout(refresh, seconds * 1000);
  }

  prepare(document);
  plan();
})();
