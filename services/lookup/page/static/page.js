// The page of the lookup service: requests drafts while the user types, and shows what the service is doing.
import { STEPS, draw, path, percent, step } from "./tree.js";

const at = (id) => document.getElementById(id);
const KEY = "draftstore-token";
const PAUSE = 180, POLL = 1000, PATIENCE = 10_000, LAST = 20_000;
let releases = [], served = "", shown = null, under = null, timer = 0;

class Refused extends Error {
  constructor(status, message, wait) { super(message); this.status = status; this.wait = wait; }
}

async function call(address, options = {}) {
  const token = sessionStorage.getItem(KEY);
  const headers = { ...options.headers, ...(token ? { Authorization: `Bearer ${token}` } : {}) };
  let response;
  try {
    response = await fetch(address, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused(0, "The service does not answer. Is it still running?", 0);
  }
  const body = await response.json().catch(() => ({}));
  if (response.ok) return body;
  // The answer to an earlier request does not invalidate a token entered since.
  if (response.status === 401 && token === sessionStorage.getItem(KEY)) askForToken(Boolean(token));
  const wait = Number(response.headers.get("Retry-After")) || 0;
  throw new Refused(response.status, body.error?.message ?? `The service answered ${response.status}.`, wait);
}

// --- tokens -----------------------------------------------------------------------------------------------------

function askForToken(wrong) {
  at("token-form").hidden = false;
  at("forget").hidden = true;
  if (wrong) { sessionStorage.removeItem(KEY); say("This token is unknown to the service."); }
}

function say(sentence) {
  at("notice").textContent = sentence;
  at("notice").hidden = !sentence;
}

// --- what is served ---------------------------------------------------------------------------------------------

async function loadReleases() {
  try {
    ({ releases } = await call("/v1/releases"));
  } catch (error) {
    if (error.status !== 401) say(error.message);
    return;
  }
  say(releases.length ? "" : "No release is served yet.");
  at("token-form").hidden = true;
  at("forget").hidden = !sessionStorage.getItem(KEY);
  fill(at("release"), releases.map((release) => release.name), at("release").value);
  // The same build again, after the service was away: what is drawn is still valid.
  if (describe() || !shown) ask();
}

/** Offer values; a list that already offers them is kept, because the user may have it open. */
function fill(select, values, wanted) {
  const offered = Array.from(select.options, (option) => option.value);
  if (JSON.stringify(offered) !== JSON.stringify(values)) select.replaceChildren(...values.map((value) => new Option(value, value)));
  if (values.includes(wanted)) select.value = wanted;
}

function chooseRelease() { describe(); ask(); }

/** Describe the chosen release; return whether the description has changed. */
function describe() {
  const release = releases.find((entry) => entry.name === at("release").value);
  if (!release) return false;
  const before = served + at("about").textContent;
  const strategy = at("strategy").value;
  fill(at("strategy"), release.strategies, release.strategies.includes(strategy) && served === release.name ? strategy : release.default_strategy);
  served = release.name;
  const counts = ["documents", "tokens", "entries"].filter((what) => release[what]).map((what) => `${release[what].toLocaleString("en")} ${what}`);
  at("about").textContent = [`${release.kind.toUpperCase()} on ${release.backend}`, ...counts, release.target_model && `model ${release.target_model}`, release.tokenizer.name && `tokenizer ${release.tokenizer.name}`, `build ${release.build.slice(0, 12)}`, release.partition && `part ${release.partition}`].filter(Boolean).join(" · ");
  return served + at("about").textContent !== before;
}

// --- drafts -----------------------------------------------------------------------------------------------------

function soon() { drop(); timer = setTimeout(ask, PAUSE); at("tree").classList.add("stale"); }

/** Cancel the pending or running request, even while its answer is being read. */
function drop() { clearTimeout(timer); under?.abort(); under = null; }

async function ask() {
  drop();
  const text = at("text").value;
  mark("");
  if (!at("release").value) return;
  if (!text) { clear("Type a text to see what would be drafted after it."); return; }
  if (!at("ask").checkValidity()) { clear(`Max nodes: 0 to ${at("budget").max}. Min probability: 0 to 1.`, true); return; }
  at("tree").classList.add("stale");
  const mine = (under = new AbortController());
  const question = {
    release: at("release").value, strategy: at("strategy").value, text: end(text),
    budget: at("budget").valueAsNumber, min_prob: at("min-prob").valueAsNumber,
  };
  const begin = performance.now();
  try {
    const reply = await call("/v1/draft", {
      method: "POST", body: JSON.stringify(question), signal: mine.signal, headers: { "Content-Type": "application/json" },
    });
    if (mine === under) show(reply, performance.now() - begin, text);
  } catch (error) {
    if (error.name === "AbortError" || mine !== under) return;
    clear(error.message, true);
    if (error.wait) timer = setTimeout(ask, error.wait * 1000);
  }
}

/** The end of a text, which alone determines the draft; never begins inside a character. */
const end = (text) => text.slice(-LAST).replace(/^[\udc00-\udfff]/, "");

function clear(sentence, bad = false) {
  shown = null;
  for (const id of ["tree", "facts", "legend", "keys", "listing", "tip"]) at(id).hidden = true;
  at("message").hidden = false;
  at("message").textContent = sentence;
  at("message").classList.toggle("bad", bad);
}

const duration = (us) => us == null ? "–" : us < 1000 ? `${Math.round(us)} µs` : us < 1e6 ? `${(us / 1000).toFixed(us < 1e4 ? 1 : 0)} ms` : `${(us / 1e6).toFixed(1)} s`;
const counted = (n, noun) => `${n.toLocaleString("en")} ${noun}${n === 1 ? "" : "s"}`;

function show(reply, millis, text) {
  const draft = reply.drafts[0], nodes = draft.nodes;
  shown = draft;
  mark(draft.matched_text ?? "");
  at("facts").hidden = false;
  at("match-length").textContent = counted(draft.match_length, "token");
  at("match-count").textContent = draft.match_length ? `seen ${counted(draft.match_count, "time")}` : "nothing similar stored";
  at("nodes").textContent = nodes.length.toLocaleString("en");
  const depth = nodes.reduce((most, _, i) => Math.max(most, path(nodes, i).length), 0);
  at("depth").textContent = nodes.length ? `up to ${counted(depth, "token")} deep` : "";
  at("expected").textContent = nodes.reduce((sum, node) => sum + node.prob, 0).toFixed(2);
  at("lookup").textContent = duration(reply.lookup_us);
  at("browser").textContent = duration(millis * 1000);
  at("tree").classList.remove("stale");
  const none = nodes.length === 0;
  for (const id of ["tree", "legend", "keys", "listing"]) at(id).hidden = none;
  at("tip").hidden = true;
  at("message").hidden = !none;
  at("message").classList.remove("bad");
  at("message").textContent = at("budget").valueAsNumber === 0 ? "A draft of at most 0 nodes is empty." : "No draft: the store has no continuation of this text that is likely enough.";
  if (none) return;
  const drawn = draw(at("tree"), draft, { show: point, hide: () => { at("tip").hidden = true; }, choose: (i) => goOn(i, text) });
  if (drawn < nodes.length) at("depth").textContent = `the first ${drawn} are drawn`;
  list(nodes);
}

function list(nodes) {
  at("listing").querySelector("tbody").replaceChildren(...nodes.map((node, i) => {
    const row = document.createElement("tr");
    const cells = [i + 1, path(nodes, i).map((k) => nodes[k].shown).join(""), node.token, percent(node.prob)];
    row.append(...cells.map((value) => { const cell = document.createElement("td"); cell.textContent = value; return cell; }));
    return row;
  }));
}

/** Mark the end of the typed text that matched. */
function mark(matched) {
  const text = at("text").value, ends = [matched, matched.trimStart()].find((end) => end && text.endsWith(end)) ?? "";
  const marked = document.createElement("mark");
  marked.textContent = ends;
  // The blank line keeps the mirror as long as a text that ends in a line break.
  at("mirror").replaceChildren(text.slice(0, text.length - ends.length), ...(ends ? [marked] : []), "\n");
  at("mirror").scrollTop = at("text").scrollTop;
}

function point(index, box) {
  const tip = at("tip"), node = shown.nodes[index];
  const before = document.createElement("b");
  before.textContent = path(shown.nodes, index).map((i) => shown.nodes[i].shown).join("");
  const precise = node.prob >= 0.01 ? `${(node.prob * 100).toFixed(1)} %` : `${(node.prob * 100).toPrecision(2)} %`;
  tip.replaceChildren(before, document.createElement("br"), `probability ${precise} · rank ${index + 1} of ${shown.nodes.length} · id ${node.token} · ${counted(path(shown.nodes, index).length, "token")} deep`);
  tip.hidden = false;
  const place = box.getBoundingClientRect(), size = tip.getBoundingClientRect(), tree = at("tree").getBoundingClientRect();
  const above = tree.top - size.height - 8; // outside of the tree, whose other nodes it would cover
  tip.style.left = `${Math.max(8, Math.min(place.left, innerWidth - size.width - 8))}px`;
  tip.style.top = `${above > 8 ? above : Math.min(tree.bottom + 8, innerHeight - size.height - 8)}px`;
}

/** Append the tokens up to a node to the text, like a model that accepts them. */
function goOn(index, text) {
  const pieces = path(shown.nodes, index).map((i) => shown.nodes[i].text);
  if (pieces.includes(null)) { say("This path contains part of a character: it cannot be typed."); return; }
  say("");
  at("text").value = text + pieces.join("");
  at("text").scrollTop = at("text").scrollHeight;
  at("tip").hidden = true;
  at("text").focus();
  ask();
}

// --- live figures -----------------------------------------------------------------------------------------------

const rate = (n) => n.toLocaleString("en", { maximumFractionDigits: n < 10 ? 1 : 0 });
const share = (n) => (n == null ? "–" : `${(n * 100).toFixed(n && n < 0.1 ? 1 : 0)} %`);
const mean = (n) => (n == null ? "–" : n.toFixed(1));

function showFigures(figures) {
  const total = figures.total;
  at("queries").textContent = rate(total.queries_per_s);
  at("p50").textContent = duration(total.p50_us);
  at("p99").textContent = duration(total.p99_us);
  at("misses").textContent = share(total.miss_rate);
  at("mean-match").textContent = mean(total.match_length);
  at("waiting").textContent = figures.waiting.toLocaleString("en");
  at("connections").textContent = counted(figures.connections, "connection");
  at("swaps").textContent = total.swaps.toLocaleString("en");
  at("window").textContent = `the last ${Math.round(figures.window_s)} s · up for ${uptime(figures.uptime_s)}`;
  curve(figures.history);
  at("by-release").querySelector("tbody").replaceChildren(...figures.releases.map((row) => {
    const cells = [row.name, rate(row.queries_per_s), duration(row.p50_us), duration(row.p99_us), share(row.miss_rate), mean(row.match_length), mean(row.nodes), row.swaps, row.queries.toLocaleString("en"), row.failures.toLocaleString("en")];
    const line = document.createElement("tr");
    line.append(...cells.map((value) => { const cell = document.createElement("td"); cell.textContent = value; return cell; }));
    return line;
  }));
  state("ready", true);
}

const uptime = (s) => s < 120 ? `${Math.round(s)} s` : s < 7200 ? `${Math.round(s / 60)} min` : s < 172800 ? `${Math.round(s / 3600)} h` : `${Math.round(s / 86400)} days`;

function state(words, good) {
  if (at("state").textContent !== words) at("state").textContent = words;
  at("state").className = `pill ${good ? "good" : "bad"}`;
}

function curve(history) {
  const most = Math.max(1, ...history), last = Math.max(1, history.length - 1);
  const points = history.map((n, i) => `${((i / last) * 120).toFixed(1)} ${(26.5 - (n / most) * 25).toFixed(1)}`);
  const line = document.createElementNS("http://www.w3.org/2000/svg", "path"), area = line.cloneNode();
  line.setAttribute("d", points.length > 1 ? `M${points.join("L")}` : "");
  area.setAttribute("d", points.length > 1 ? `M0 28L${points.join("L")}L120 28Z` : "");
  area.setAttribute("class", "area");
  at("curve").replaceChildren(area, line);
}

async function poll() {
  if (!document.hidden) {
    const away = at("state").classList.contains("bad");
    try {
      showFigures(await call("/v1/figures", { signal: AbortSignal.timeout(PATIENCE) }));
      if (away || !releases.length) await loadReleases();
    } catch (error) {
      state(error.status === 401 ? "token needed" : "away", false);
    }
  }
  setTimeout(poll, POLL);
}

// --- all together -----------------------------------------------------------------------------------------------

function legend() {
  const bounds = Array.from({ length: STEPS }, (_, i) => ((i + 0.001) / STEPS) ** 2);
  at("legend").querySelector("ol").replaceChildren(...bounds.map((prob) => {
    const item = document.createElement("li");
    item.className = `p${step(prob)}`;
    item.textContent = prob < 0.001 ? "0" : `${Math.round(prob * 100)}%`;
    return item;
  }));
}

at("release").addEventListener("change", chooseRelease);
at("strategy").addEventListener("change", ask);
for (const id of ["budget", "min-prob"]) at(id).addEventListener("input", soon);
at("text").addEventListener("input", () => { mark(""); soon(); });
at("text").addEventListener("scroll", () => { at("mirror").scrollTop = at("text").scrollTop; });
at("ask").addEventListener("submit", (event) => { event.preventDefault(); ask(); });
at("ask").addEventListener("keydown", (event) => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); ask(); } });
at("token-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, at("token").value.trim());
  at("token").value = "";
  say("");
  loadReleases();
});
at("forget").addEventListener("click", () => { sessionStorage.removeItem(KEY); location.reload(); });
addEventListener("scroll", () => { at("tip").hidden = true; }, { passive: true });
legend();
loadReleases().then(poll);
