"use strict";
const at = id => document.getElementById(id);
const say = (id, text) => { if (at(id).textContent !== text) at(id).textContent = text; };
const KEY = "smelt-api-key"; // in sessionStorage, which ends with the tab

function make(name, attributes, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children); // strings become text, never markup
  return element;
}

async function request(path, options = {}) {
  // Sent even if empty: a request with this header gets no challenge that lets the browser prompt for a password.
  const headers = {"x-api-key": sessionStorage.getItem(KEY) ?? "", ...options.headers};
  const response = await fetch(path, {cache: "no-store", ...options, headers});
  if (response.status === 401) askForKey();
  return response;
}

async function errorMessage(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return "the server answered with status " + response.status + ".";
  }
}

function askForKey() {
  say("keyerror", sessionStorage.getItem(KEY) ? "The server does not accept this API key." : "");
  if (!at("keyform").hidden) return;
  at("content").hidden = true;
  at("keyform").hidden = false;
  at("key").focus();
}

function onKey(start) {
  at("keyform").addEventListener("submit", async event => {
    event.preventDefault();
    const key = at("key").value.trim();
    sessionStorage.setItem(KEY, /^[\x21-\x7e]+$/.test(key) ? key : "not-a-key"); // a header has no other characters
    if (!(await request("version")).ok) return;
    at("key").value = "";
    at("keyform").hidden = true;
    at("content").hidden = false;
    start();
  });
}
