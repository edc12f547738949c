// Conversations in localStorage, one key each, so that two tabs disturb one another only within one conversation.
// Servers behind one host share its storage: keys hold the page's path.
//
// conversation: {id, title, system, created, updated, messages}
// message: {role: "user", content} | {role: "tool", tool_call_id, content} | an answer, see `run.js`

const PREFIX = `octavo:${location.pathname}:`;
const CONVERSATION = `${PREFIX}c:`;
const SETTINGS = `${PREFIX}settings`;
const KEY = `${PREFIX}key`;
const TITLE_LENGTH = 60;

export function newConversation() {
  const now = Date.now();
  return { id: crypto.randomUUID?.() ?? `${now}-${Math.random()}`, title: "", system: "", created: now, updated: now, messages: [] };
}

/** All conversations, the one used last first. */
export function loadConversations() {
  return Object.keys(localStorage)
    .filter((key) => key.startsWith(CONVERSATION))
    .map((key) => read(localStorage, key))
    .filter((found) => typeof found?.id === "string" && Array.isArray(found.messages))
    .sort((a, b) => b.updated - a.updated);
}

/** Save it; true, or false if the storage is full even without the token probabilities. */
export function saveConversation(conversation) {
  const first = conversation.messages.find((message) => message.role === "user");
  conversation.title = title(first?.content ?? "");
  const key = CONVERSATION + conversation.id;
  if (write(key, conversation)) return true;
  // Probabilities are most of the bytes and the least of the loss.
  const messages = conversation.messages.map((message) => (message.tokens ? { ...message, tokens: [] } : message));
  return write(key, { ...conversation, messages });
}

export function removeConversation(id) {
  localStorage.removeItem(CONVERSATION + id);
}

/** Call back when another tab has changed something. */
export function onChangeElsewhere(callback) {
  addEventListener("storage", (event) => {
    if (event.key === null || event.key.startsWith(CONVERSATION)) callback();
  });
}

export function loadSettings() {
  return read(localStorage, SETTINGS) ?? {};
}

export function saveSettings(settings) {
  return write(SETTINGS, settings);
}

/** The API key lives as long as the tab. */
export function loadKey() {
  return sessionStorage.getItem(KEY) ?? "";
}

export function saveKey(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

function title(text) {
  const line = text.trim().split("\n")[0];
  return line.length > TITLE_LENGTH ? `${line.slice(0, TITLE_LENGTH - 1).trimEnd()}…` : line;
}

function read(storage, key) {
  try {
    return JSON.parse(storage.getItem(key));
  } catch {
    return null; // written by something else: as good as absent
  }
}

function write(key, value) {
  try {
    localStorage.setItem(key, JSON.stringify(value));
    return true;
  } catch (error) {
    if (error.name === "QuotaExceededError") return false;
    throw error;
  }
}
