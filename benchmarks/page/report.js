"use strict";
// Timelines: every engine's lanes on one axis of microseconds, drawn on a canvas, only what is in view.
(() => {
  const LANE = 20, HEAD = 22, AXIS = 24, EDGE = 0.02;

  class Timeline {
    constructor(figure) {
      this.figure = figure;
      this.canvas = figure.querySelector("canvas");
      this.tip = figure.querySelector(".tip");
      this.data = JSON.parse(figure.querySelector("script").textContent);
      this.lanes = [...figure.querySelectorAll(".legend span")].map((one) => one.dataset.lane);
      for (const one of figure.querySelectorAll(".legend span"))
        one.style.setProperty("--lane", `var(--${one.dataset.lane})`);
      this.shown = new Set(Object.keys(this.data).slice(0, 2));
      this.pointers = new Map();
      this.makeTools();
      this.listen();
      this.reset();
      new ResizeObserver(() => this.draw()).observe(this.canvas);
    }

    makeTools() {
      const tools = this.figure.querySelector(".tools");
      const button = (text, label, act) => {
        const made = document.createElement("button");
        made.type = "button";
        made.textContent = text;
        made.setAttribute("aria-label", label);
        made.addEventListener("click", act);
        tools.append(made);
      };
      button("+", "zoom in", () => this.zoom(0.5, 0.5));
      button("−", "zoom out", () => this.zoom(2, 0.5));
      button("all", "show the whole step", () => this.reset());
      for (const name of Object.keys(this.data)) {
        const label = document.createElement("label");
        const box = document.createElement("input");
        box.type = "checkbox";
        box.checked = this.shown.has(name);
        box.addEventListener("change", () => {
          if (box.checked) this.shown.add(name); else this.shown.delete(name);
          this.reset();
        });
        label.append(box, name);
        tools.append(label);
      }
    }

    listen() {
      const canvas = this.canvas;
      canvas.addEventListener("wheel", (event) => {
        event.preventDefault();
        this.zoom(Math.exp(event.deltaY / 300), this.share(event));
      }, { passive: false });
      canvas.addEventListener("pointerdown", (event) => {
        try { canvas.setPointerCapture(event.pointerId); } catch (_) { /* a pointer that is gone already */ }
        this.pointers.set(event.pointerId, this.share(event));
      });
      for (const kind of ["pointerup", "pointercancel"])
        canvas.addEventListener(kind, (event) => this.pointers.delete(event.pointerId));
      canvas.addEventListener("pointerleave", () => { this.tip.hidden = true; });
      canvas.addEventListener("pointermove", (event) => this.move(event));
      canvas.addEventListener("keydown", (event) => {
        const acts = {
          ArrowLeft: () => this.pan(-0.1), ArrowRight: () => this.pan(0.1),
          "+": () => this.zoom(0.5, 0.5), "-": () => this.zoom(2, 0.5), 0: () => this.reset(),
        };
        if (acts[event.key]) { event.preventDefault(); acts[event.key](); }
      });
    }

    move(event) {
      const before = this.pointers.get(event.pointerId), now = this.share(event);
      if (before === undefined) { this.hover(event); return; }
      const others = [...this.pointers].filter(([id]) => id !== event.pointerId);
      if (others.length) {
        const fixed = others[0][1], old = Math.abs(before - fixed), young = Math.abs(now - fixed);
        if (old > EDGE && young > EDGE) this.zoom(old / young, fixed);
      } else this.pan(before - now);
      this.pointers.set(event.pointerId, now);
    }

    share(event) {
      const box = this.canvas.getBoundingClientRect();
      return Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
    }

    reset() {
      const ends = [...this.shown].flatMap((name) => this.data[name].spans.map((span) => span[2] + span[3]));
      this.whole = ends.reduce((most, end) => Math.max(most, end), 1);
      this.show(0, this.whole);
    }

    zoom(factor, share) {
      const width = this.to - this.from, fixed = this.from + share * width;
      const wanted = Math.min(this.whole, Math.max(1, width * factor));
      this.show(fixed - share * wanted, fixed + (1 - share) * wanted);
    }

    pan(share) {
      const step = share * (this.to - this.from);
      this.show(this.from + step, this.to + step);
    }

    show(from, to) {
      const width = to - from;
      this.from = Math.min(Math.max(0, from), this.whole - width);
      this.to = this.from + width;
      this.figure.dataset.from = this.from;
      this.figure.dataset.to = this.to;
      this.draw();
    }

    // Where each engine's lanes are: lanes that it does not use take no room.
    rows() {
      const rows = [];
      let top = 0;
      for (const name of this.shown) {
        rows.push({ name, top, height: HEAD });
        top += HEAD;
        for (const lane of this.lanes) {
          const spans = this.data[name].spans.filter((span) => span[0] === lane);
          if (!spans.length) continue;
          rows.push({ name, lane, spans, top, height: LANE });
          top += LANE;
        }
      }
      return { rows, height: top + AXIS };
    }

    draw() {
      const { rows, height } = this.rows();
      const scale = window.devicePixelRatio || 1, width = this.canvas.clientWidth;
      if (!width) return;
      this.canvas.style.height = `${height}px`;
      this.canvas.width = Math.round(width * scale);
      this.canvas.height = Math.round(height * scale);
      const pen = this.canvas.getContext("2d"), style = getComputedStyle(document.documentElement);
      const colour = (name) => style.getPropertyValue(`--${name}`).trim();
      pen.scale(scale, scale);
      const place = (time) => (time - this.from) / (this.to - this.from) * width;
      pen.font = "12px system-ui, sans-serif";
      pen.textBaseline = "middle";
      for (const row of rows) {
        if (!row.lane) {
          pen.fillStyle = colour("ink");
          const dropped = this.data[row.name].dropped;
          pen.fillText(row.name + (dropped ? ` (${dropped} shortest left out)` : ""), 4, row.top + HEAD / 2);
          continue;
        }
        pen.fillStyle = colour(row.lane);
        for (const [, , start, length] of row.spans) {
          const left = place(start), right = place(start + length);
          if (right < 0 || left > width) continue;
          pen.fillRect(left, row.top + 2, Math.max(1, right - left - 0.5), LANE - 4);
        }
      }
      this.axis(pen, width, height, colour("ink"), place);
    }

    axis(pen, width, height, ink, place) {
      const rough = (this.to - this.from) / Math.max(2, width / 110);
      const ten = 10 ** Math.floor(Math.log10(rough));
      const step = [1, 2, 5, 10].map((one) => one * ten).find((one) => one >= rough);
      pen.fillStyle = ink;
      for (let time = Math.ceil(this.from / step) * step; time <= this.to; time += step) {
        pen.fillRect(place(time), height - AXIS, 1, 5);
        pen.fillText(`${+(time / 1000).toPrecision(6)} ms`, place(time) + 3, height - AXIS / 2);
      }
    }

    hover(event) {
      const box = this.canvas.getBoundingClientRect();
      const y = event.clientY - box.top, time = this.from + this.share(event) * (this.to - this.from);
      const near = 2 * (this.to - this.from) / box.width;
      const row = this.rows().rows.find((one) => one.lane && y >= one.top && y < one.top + one.height);
      const span = row && row.spans.find((one) => time >= one[2] - near && time <= one[2] + one[3] + near);
      this.tip.hidden = !span;
      if (!span) return;
      const [lane, name, start, length] = span;
      this.tip.textContent = `${name} · ${lane} · ${(length / 1000).toFixed(3)} ms from ${(start / 1000).toFixed(3)} ms`;
      const left = event.clientX - this.figure.getBoundingClientRect().left;
      this.tip.style.left = `${Math.max(0, Math.min(left, this.figure.clientWidth - this.tip.offsetWidth))}px`;
      this.tip.style.top = `${this.canvas.offsetTop + y + 18}px`;
    }
  }

  for (const figure of document.querySelectorAll(".timeline")) new Timeline(figure);
  document.documentElement.dataset.ready = "yes";
})();
