// The page of `accelerate monitor`: asks the server for the state once a second and draws it.
// Everything that comes from a run is set as text, never as markup.
'use strict';

const kColors = ['#4c6ef5', '#e8590c', '#2b8a3e', '#c2255c', '#0c8599', '#9c36b5', '#b08900', '#5c6b7f'];
const kInset = {left: 52, right: 10, top: 8, bottom: 20};
const $ = id => document.getElementById(id);

const view = {axis: 'step', log: false, smooth: 0, from: 0, to: 0, runs: null, focus: null, logFile: null};
let state = null;          // the last answer of the server
const charts = new Map();  // by group and title

function node(tag, text, className) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

// ---- numbers ------------------------------------------------------------------------------------

function short(value, digits = 4) {
  if (value === null || value === undefined || !isFinite(value)) return '–';
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-4 || size >= 1e7)) return value.toExponential(2).replace('e+', 'e');
  if (size >= 1000) return Math.round(value).toLocaleString('en');
  return String(parseFloat(value.toPrecision(digits)));
}
const count = value => value === null || value === undefined ? '–' : Math.round(value).toLocaleString('en');
function bytes(value) {
  if (value === null || value === undefined) return '–';
  const units = ['B', 'KB', 'MB', 'GB', 'TB'];
  let unit = 0;
  while (value >= 1000 && unit < 4) { value /= 1000; unit++; }
  return (unit ? value.toPrecision(3) : value) + ' ' + units[unit];
}
function duration(seconds) {
  const s = Math.max(0, Math.round(seconds));
  if (s < 100) return s + ' s';
  const two = n => String(n).padStart(2, '0');
  const clock = two(Math.floor(s / 60) % 60) + ':' + two(s % 60);
  const hours = Math.floor(s / 3600);
  return hours ? (hours >= 24 ? Math.floor(hours / 24) + ' d ' : '') + (hours % 24) + ':' + clock : clock;
}
function inUnit(value, unit) {
  if (unit === 'bytes') return bytes(value);
  return short(value) + (unit === '%' ? ' %' : '');
}
const xText = x => view.axis === 'time' ? duration(x) : short(x, 7);

/** About `count` round numbers between two others. */
function ticks(low, high, count) {
  const raw = (high - low) / count;
  const power = Math.pow(10, Math.floor(Math.log10(raw)));
  const step = [1, 2, 5, 10].map(f => f * power).find(each => each >= raw * 0.75);
  if (!(low + step > low)) return [low];  // numbers are not that exact
  const found = [];
  for (let at = Math.ceil(low / step) * step; at <= high + step * 1e-9; at += step) found.push(Math.abs(at) < step * 1e-9 ? 0 : at);
  return found;
}

// ---- charts -------------------------------------------------------------------------------------

function smoothed(values) {
  if (view.smooth === 0) return values;
  let mean = 0, weight = 0;
  return values.map(value => {
    mean = view.smooth * mean + (1 - view.smooth) * value;
    weight = view.smooth * weight + (1 - view.smooth);
    return mean / weight;
  });
}

class Chart {
  constructor(group) {
    this.box = node('div', undefined, 'card chart');
    this.title = node('span', '', 'title');
    this.unit = node('span', '', 'unit');
    this.value = node('span', '', 'value');
    const head = node('h3');
    head.append(this.title, this.unit, this.value);
    this.canvas = node('canvas');
    this.canvas.setAttribute('role', 'img');
    this.legend = node('div', undefined, 'legend');
    this.tip = node('div', undefined, 'tip');
    this.tip.hidden = true;
    this.box.append(head, this.canvas, this.legend, this.tip);
    $(group).append(this.box);
    this.hover = null;  // x in pixels
    this.drag = null;
    new ResizeObserver(() => this.draw()).observe(this.canvas);
    this.canvas.addEventListener('pointermove', event => { this.hover = event.offsetX; this.draw(); });
    this.canvas.addEventListener('pointerleave', () => { this.hover = this.drag = null; this.draw(); });
    this.canvas.addEventListener('pointerdown', event => { if (event.pointerType !== 'touch') this.drag = event.offsetX; });
    this.canvas.addEventListener('pointerup', event => this.zoom(event.offsetX));
    this.canvas.addEventListener('dblclick', unzoom);
  }

  set(data) {
    this.data = data;
    this.title.textContent = this.title.title = data.title;
    this.unit.textContent = data.unit === 'bytes' ? '' : data.unit;
    const last = data.lines.length === 1 ? data.lines[0].last : null;
    this.value.textContent = last === null ? '' : inUnit(last, data.unit);
    this.canvas.setAttribute('aria-label', data.title + ', ' + data.lines.map(line => line.label + ' ' + inUnit(line.last, data.unit)).join(', '));
    this.legend.replaceChildren();
    if (data.group === 'rank' && data.lines.length > 1) {  // the list of runs has their colours
      data.lines.forEach((line, i) => {
        const entry = node('span', line.label);
        entry.style.setProperty('--line', this.color(line, i));
        this.legend.append(entry);
      });
    }
    this.draw();
  }

  color(line, index) {
    return kColors[(this.data.group === 'rank' ? index : line.run) % kColors.length];
  }

  zoom(to) {
    const from = this.drag;
    this.drag = null;
    if (from === null || Math.abs(to - from) < 6 || !this.range) return this.draw();
    const [low, high] = [Math.min(from, to), Math.max(from, to)].map(x => this.toX(x));
    Object.assign(view, {from: low, to: high});
    refresh();
  }

  toX(pixel) {
    const {x0, x1, width} = this.range;
    const part = (pixel - kInset.left) / (width - kInset.left - kInset.right);
    return x0 + Math.min(Math.max(part, 0), 1) * (x1 - x0);
  }

  draw() {
    const width = this.canvas.clientWidth, height = this.canvas.clientHeight;
    if (!this.data || !width) return;
    const ratio = window.devicePixelRatio || 1;
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(height * ratio);
    const pen = this.canvas.getContext('2d');
    pen.scale(ratio, ratio);
    const lines = this.data.lines.filter(line => line.x.length);
    this.tip.hidden = true;
    if (!lines.length) return;
    const curves = lines.map(line => ({line, mean: smoothed(line.mean)}));
    this.measure(lines, curves, width);
    this.axes(pen, width, height);
    curves.forEach(curve => this.curve(pen, curve, height));
    if (this.hover !== null) this.cross(pen, curves, height);
  }

  measure(lines, curves, width) {
    let x0 = Infinity, x1 = -Infinity, y0 = Infinity, y1 = -Infinity;
    for (const {line, mean} of curves) {
      x0 = Math.min(x0, line.x[0]); x1 = Math.max(x1, line.x[line.x.length - 1]);
      for (const values of view.smooth || !line.low ? [mean] : [line.low, line.high]) {
        for (const y of values) { if (y < y0) y0 = y; if (y > y1) y1 = y; }
      }
    }
    if (view.from < view.to) { x0 = view.from; x1 = view.to; }
    if (x0 === x1) { x0 -= 1; x1 += 1; }
    const log = view.log && y0 > 0 && this.data.group !== 'rank';
    if (log) { y0 = Math.log10(y0); y1 = Math.log10(y1); }
    if (this.data.unit && this.data.unit !== 'samples/s' && this.data.unit !== 'steps/s') y0 = Math.min(y0, 0);
    const room = (y1 - y0 || Math.abs(y1) || 1) * 0.06;
    this.range = {x0, x1, y0: y0 === 0 ? 0 : y0 - room, y1: y1 + room, log, width};
  }

  px(x) {
    const {x0, x1, width} = this.range;
    return kInset.left + (x - x0) / (x1 - x0) * (width - kInset.left - kInset.right);
  }
  py(y, height) {
    const {y0, y1, log} = this.range;
    const value = log ? Math.log10(Math.max(y, 1e-300)) : y;
    return height - kInset.bottom - (value - y0) / (y1 - y0) * (height - kInset.top - kInset.bottom);
  }

  axes(pen, width, height) {
    const style = getComputedStyle(document.documentElement);
    const {x0, x1, y0, y1, log} = this.range;
    pen.font = '11px system-ui, sans-serif';
    pen.fillStyle = style.getPropertyValue('--faint');
    pen.strokeStyle = style.getPropertyValue('--grid');
    pen.lineWidth = 1;
    pen.textAlign = 'right';
    pen.textBaseline = 'middle';
    let marks = ticks(y0, y1, 4);
    if (log) marks = (y1 - y0 > 2 ? marks.filter(mark => Number.isInteger(mark)) : marks).map(mark => Math.pow(10, mark));
    for (const mark of marks) {
      const y = Math.round(this.py(mark, height)) + 0.5;
      pen.beginPath(); pen.moveTo(kInset.left, y); pen.lineTo(width - kInset.right, y); pen.stroke();
      pen.fillText(this.data.unit === 'bytes' ? bytes(mark) : short(mark, 3), kInset.left - 6, y);
    }
    pen.textBaseline = 'alphabetic';
    for (const mark of ticks(x0, x1, Math.max(2, Math.min(6, width / 110)))) {
      const x = this.px(mark);
      pen.textAlign = x > width - 30 ? 'right' : 'center';
      pen.fillText(xText(mark), Math.min(x, width - 2), height - 4);
    }
  }

  curve(pen, {line, mean}, height) {
    const color = this.color(line, this.data.lines.indexOf(line));
    pen.save();
    pen.beginPath();
    pen.rect(kInset.left, 0, this.range.width - kInset.left, height - kInset.bottom + 1);
    pen.clip();
    if (line.low) {
      pen.beginPath();
      line.x.forEach((x, i) => pen.lineTo(this.px(x), this.py(line.high[i], height)));
      for (let i = line.x.length - 1; i >= 0; i--) pen.lineTo(this.px(line.x[i]), this.py(line.low[i], height));
      pen.fillStyle = color;
      pen.globalAlpha = 0.18;
      pen.fill();
      pen.globalAlpha = 1;
    }
    pen.beginPath();
    line.x.forEach((x, i) => pen.lineTo(this.px(x), this.py(mean[i], height)));
    pen.strokeStyle = color;
    pen.lineWidth = 1.6;
    pen.lineJoin = 'round';
    pen.stroke();
    if (line.x.length === 1) { pen.fillStyle = color; pen.fillRect(this.px(line.x[0]) - 2, this.py(mean[0], height) - 2, 4, 4); }
    pen.restore();
  }

  cross(pen, curves, height) {
    const at = this.toX(this.hover);
    pen.fillStyle = pen.strokeStyle = getComputedStyle(document.documentElement).getPropertyValue('--faint');
    if (this.drag !== null) {
      pen.globalAlpha = 0.2;
      pen.fillRect(Math.min(this.drag, this.hover), kInset.top, Math.abs(this.hover - this.drag), height - kInset.top - kInset.bottom);
      pen.globalAlpha = 1;
    }
    pen.beginPath(); pen.moveTo(this.hover, kInset.top); pen.lineTo(this.hover, height - kInset.bottom); pen.stroke();
    this.tip.replaceChildren(node('div', (view.axis === 'time' ? 'after ' : 'step ') + xText(at)));
    for (const {line, mean} of curves) {
      let low = 0, high = line.x.length - 1;  // the last point at or before the pointer
      while (low < high) { const middle = (low + high + 1) >> 1; if (line.x[middle] <= at) low = middle; else high = middle - 1; }
      const mark = node('i');
      const color = this.color(line, this.data.lines.indexOf(line));
      mark.style.setProperty('--line', color);
      const row = node('div');
      row.append(mark, document.createTextNode(inUnit(mean[low], this.data.unit) + (curves.length > 1 ? '  ' + line.label : '')));
      this.tip.append(row);
      pen.beginPath(); pen.arc(this.px(line.x[low]), this.py(mean[low], height), 3, 0, 7); pen.fillStyle = color; pen.fill();
    }
    this.tip.hidden = false;
    const left = this.hover + 18 + this.tip.offsetWidth > this.range.width ? this.hover - this.tip.offsetWidth : this.hover + 24;
    this.tip.style.left = Math.max(4, left) + 'px';
    this.tip.style.top = '44px';
  }
}

function showCharts() {
  const seen = new Set();
  for (const data of state.charts) {
    const key = data.group + '\n' + data.title + '\n' + data.unit;
    seen.add(key);
    if (!charts.has(key)) charts.set(key, new Chart(data.group));
    charts.get(key).set(data);
  }
  for (const [key, chart] of charts) if (!seen.has(key)) { chart.box.remove(); charts.delete(key); }
  for (const group of ['metric', 'speed', 'rank']) {  // in the order of the server
    for (const data of state.charts) {
      if (data.group === group) $(group).append(charts.get(group + '\n' + data.title + '\n' + data.unit).box);
    }
    $(group).parentElement.hidden = !$(group).children.length;
  }
}

// ---- lists and tables ---------------------------------------------------------------------------

function showRuns() {
  $('run-count').textContent = state.runs.length > 1 ? state.runs.length : '';
  const active = document.activeElement && document.activeElement.dataset.run;
  $('runs').replaceChildren(...state.runs.map(run => {
    const item = node('li', undefined, run.id === state.focus ? 'focus' : '');
    const box = node('input');
    box.type = 'checkbox';
    box.checked = run.shown;
    box.dataset.run = run.id;
    box.style.accentColor = kColors[run.id % kColors.length];
    box.setAttribute('aria-label', 'Compare ' + run.name);
    box.addEventListener('click', event => { event.stopPropagation(); toggle(run.id); });
    const detail = node('span', undefined, 'detail');
    detail.append(node('span', run.state, 'state ' + run.state));
    const rate = run.rate === null ? '' : ' · ' + short(run.rate, 3) + ' ' + run.unit;
    detail.append(document.createTextNode((run.steps ? ' · step ' + count(run.steps) : '') + rate));
    item.append(box, node('span', run.name, 'name'), detail);
    item.addEventListener('click', () => focusOn(run.id));
    return item;
  }));
  if (active !== undefined) for (const box of $('runs').querySelectorAll('input')) if (box.dataset.run === active) box.focus();
}

function table(id, heads, rows) {
  const head = node('tr');
  for (const [text, className] of heads) head.append(node('th', text, className));
  $(id).replaceChildren(...(heads.length ? [head] : []), ...rows);
  $(id).closest('section').hidden = !rows.length && id !== 'ranks';
}
function row(cells) {
  const made = node('tr');
  for (const [text, className] of cells) made.append(node('td', text, className));
  return made;
}

function showRanks() {
  const late = /^Rank (\d+) /.exec(state.notice || '');
  const gpu = state.ranks.some(rank => rank.gpu_memory !== null);
  const heads = [['Rank', 'number'], ['Host'], ['Device'], ['Steps', 'number'], ['Step time', 'number'],
    ['Waiting', 'number'], ['Memory', 'number']].concat(gpu ? [['GPU memory', 'number'], ['GPU', 'number']] : []);
  table('ranks', heads, state.ranks.map(rank => {
    const isLate = late !== null && Number(late[1]) === rank.rank;
    const cells = [[rank.rank + (isLate ? ' straggler' : ''), isLate ? 'number late' : 'number'], [rank.host], [rank.device],
      [count(rank.steps), 'number'], [rank.step_ms === null ? '–' : short(rank.step_ms, 3) + ' ms', 'number'],
      [rank.wait_ms === null ? '–' : short(rank.wait_ms, 3) + ' ms', 'number'], [bytes(rank.memory), 'number']];
    if (gpu) cells.push([bytes(rank.gpu_memory) + ' of ' + bytes(rank.gpu_total), 'number'], [inUnit(rank.gpu_busy, '%'), 'number']);
    return row(cells);
  }));
  $('ranks').parentElement.hidden = !state.ranks.some(rank => rank.device);
}

function showFacts() {
  const run = state.runs.find(each => each.id === state.focus);
  const facts = [];
  if (run) {
    const mean = key => { const all = state.ranks.map(rank => rank[key]).filter(each => each !== null); return all.length ? all.reduce((a, b) => a + b) / all.length : null; };
    const loss = state.charts.find(chart => chart.group === 'metric');
    const line = loss && loss.lines.find(each => each.run === run.id);
    if (line) facts.push([loss.title, short(line.last)]);
    if (run.steps) facts.push(['Step', count(run.steps)]);
    if (run.rate !== null) facts.push([run.unit === 'steps/s' ? 'Steps/s' : 'Samples/s', short(run.rate, 3)]);
    if (mean('step_ms') !== null) facts.push(['Step time', short(mean('step_ms'), 3) + ' ms']);
    if (mean('wait_ms') !== null) facts.push(['Waiting', short(100 * mean('wait_ms') / mean('step_ms'), 2) + ' %']);
    if (mean('gpu_busy') !== null) facts.push(['GPU', short(mean('gpu_busy'), 3) + ' %']);
    facts.push([run.state === 'running' ? 'Running for' : 'Ran for', duration((run.state === 'running' ? state.now : run.updated) - run.started)]);
  }
  $('facts').replaceChildren(...facts.map(([label, value]) => {
    const made = node('div');
    made.append(node('span', label, 'label'), node('span', value, 'value'));
    return made;
  }));
}

function showNotices() {
  const notices = [];
  const run = state.runs.find(each => each.id === state.focus);
  if (state.notice) notices.push([state.notice]);
  if (run && run.state === 'failed') notices.push(['This run ended by an error.', 'error']);
  if (run && run.state === 'silent' && state.ranks.some(rank => rank.device)) notices.push(['This run has written nothing for ' + duration(state.now - run.updated) + ', and no end: it was killed or stopped.']);
  for (const chart of state.charts) {
    for (const line of chart.lines) {
      if (line.not_finite) notices.push([chart.title + ' is not finite ' + short(line.not_finite) + (line.not_finite === 1 ? ' time' : ' times') + ', first at step ' + short(line.first_not_finite, 9) + ' (' + line.label + ').', 'error']);
    }
  }
  if (state.read < 1) notices.push(['Reading the files of the runs: ' + Math.floor(state.read * 100) + ' %']);
  $('notices').replaceChildren(...notices.map(([text, className]) => node('p', text, className)));
}

function showTables() {
  showRanks();
  table('checkpoints', [['Checkpoint'], ['Saved'], ['Files', 'number'], ['Size', 'number'], ['State']],
    state.checkpoints.slice().reverse().map(each => row([[each.name], [new Date(each.saved_at * 1000).toLocaleString(), 'time'],
      [each.files, 'number'], [bytes(each.bytes), 'number'], [each.state, each.state === 'complete' ? 'good' : 'bad']])));
  table('config', [], state.config.map(([name, value]) => row([[name], [value]])));
}

async function showLog() {
  $('log-text').parentElement.hidden = !state.logs.length;
  if (!state.logs.length) return;
  if (!state.logs.includes(view.logFile)) view.logFile = state.logs[0];
  const select = $('log-file');
  if ([...select.options].map(each => each.value).join('\n') !== state.logs.join('\n')) {
    select.replaceChildren(...state.logs.map(name => node('option', name)));
  }
  select.value = view.logFile;
  const answer = await fetch('api/log?file=' + encodeURIComponent(view.logFile));
  if (!answer.ok) return;
  const box = $('log-text');
  const follows = box.scrollTop + box.clientHeight >= box.scrollHeight - 8;
  box.textContent = (await answer.json()).lines.join('\n');
  if (follows) box.scrollTop = box.scrollHeight;
}

function show() {
  $('folder').textContent = $('folder').title = state.folder;
  $('empty').hidden = state.runs.length > 0;
  $('empty').textContent = 'There are no runs here yet.\nStart one with ACCELERATE_MONITOR=1, with `accelerate launch --monitor`, or with monitor = true in its ProjectConfiguration.';
  document.title = (state.runs.some(run => run.state === 'running') ? '● ' : '') + 'accelerate monitor';
  showRuns(); showNotices(); showFacts(); showCharts(); showTables();
}

// ---- what the user does -------------------------------------------------------------------------

function toggle(id) {
  const shown = state.runs.filter(run => run.shown).map(run => run.id);
  view.runs = shown.includes(id) ? shown.filter(each => each !== id) : shown.concat(id);
  refresh();
}
function focusOn(id) {
  view.focus = id;
  if (view.runs && !view.runs.includes(id)) view.runs = view.runs.concat(id);
  refresh();
}
function unzoom() { view.from = view.to = 0; refresh(); }
function setAxis(axis) {
  view.axis = axis;
  for (const each of ['step', 'time']) $('axis-' + each).setAttribute('aria-pressed', each === axis);
  unzoom();
}
function setLog(on) {
  view.log = on;
  $('log').setAttribute('aria-pressed', on);
  for (const chart of charts.values()) chart.draw();
}

document.addEventListener('keydown', event => {
  if (event.ctrlKey || event.metaKey || event.altKey || !state || /^(INPUT|SELECT)$/.test(event.target.tagName) && event.target.type !== 'checkbox') return;
  const ids = state.runs.map(run => run.id);
  if (event.key === 'x') setAxis(view.axis === 'step' ? 'time' : 'step');
  else if (event.key === 'l') setLog(!view.log);
  else if (event.key === 'Escape') unzoom();
  else if (/^[1-9]$/.test(event.key) && event.key <= ids.length) toggle(ids[event.key - 1]);
  else if ((event.key === 'ArrowDown' || event.key === 'ArrowUp') && ids.length > 1 && event.target.id !== 'log-text') {
    const next = ids.indexOf(state.focus) + (event.key === 'ArrowDown' ? 1 : -1);
    focusOn(ids[(next + ids.length) % ids.length]);
    event.preventDefault();
  }
});
$('axis-step').addEventListener('click', () => setAxis('step'));
$('axis-time').addEventListener('click', () => setAxis('time'));
$('log').addEventListener('click', () => setLog(!view.log));
$('unzoom').addEventListener('click', unzoom);
$('smooth').addEventListener('input', event => { view.smooth = Number(event.target.value); for (const chart of charts.values()) chart.draw(); });
$('log-file').addEventListener('change', event => { view.logFile = event.target.value; $('log-text').scrollTop = 1e9; showLog(); });

// ---- asking -------------------------------------------------------------------------------------

let version = '', busy = false, again = false;

async function refresh() {  // after a change of the view
  version = '';
  await ask();
}

async function ask() {
  if (busy) { again = true; return; }
  busy = true;
  try {
    const width = Math.max(120, ...[...charts.values()].map(chart => chart.canvas.clientWidth));
    const query = new URLSearchParams({axis: view.axis, columns: Math.min(800, Math.round(width)), version});
    if (view.runs) query.set('runs', view.runs.join(','));
    if (view.focus !== null) query.set('focus', view.focus);
    if (view.from < view.to) { query.set('from', view.from); query.set('to', view.to); }
    $('unzoom').hidden = !(view.from < view.to);
    const answer = await fetch('api/state?' + query);
    if (answer.status === 200) {
      const text = await answer.text();
      state = JSON.parse(text);
      version = state.version;
      show();
    } else if (answer.status !== 304) {
      throw new Error(await answer.text());
    }
    await showLog();
    const running = state.runs.some(run => run.state === 'running');
    $('link').textContent = running ? 'live' : 'idle';
    $('link').className = running ? '' : 'idle';
  } catch (error) {
    $('link').textContent = 'no answer from the server';
    $('link').className = 'lost';
  }
  busy = false;
  if (again) { again = false; await refresh(); }
}

async function loop() {
  if (!document.hidden) await ask();
  setTimeout(loop, state && state.read < 1 ? 300 : 1000);
}
document.addEventListener('visibilitychange', () => { if (!document.hidden) ask(); });
loop();
