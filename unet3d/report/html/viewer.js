// Show the cases of a page: with NiiVue where it is and WebGL 2 works, else as slices on a canvas.
"use strict";
(() => {
  const cases = JSON.parse(document.getElementById("viewer-cases").textContent);
  const root = document.getElementById("viewer");
  const PLANES = ["sagittal", "coronal", "axial"];
  // The patient's right is on the left, as in radiology: left, right, upper and lower edge.
  const EDGES = [["A", "P", "S", "I"], ["R", "L", "S", "I"], ["R", "L", "A", "P"]];
  const ERRORS = [ // colors that no class has
    { name: "missed", color: "#3333ff", note: "in the reference only" },
    { name: "added", color: "#00ffff", note: "predicted only" },
    { name: "another class", color: "#ffffff", note: "" },
  ];
  const state = { number: 0, plane: 2, multi: true, slices: [0, 0, 0], layer: 0, opacity: 0.6 };
  let shown = null; // the case, with its volumes
  let renderer = null;

  function element(name, properties = {}, ...children) {
    const made = Object.assign(document.createElement(name), properties);
    made.append(...children);
    return made;
  }

  async function read(source) {
    const packed = source.url
      ? new Uint8Array(await (await fetch(source.url)).arrayBuffer())
      : Uint8Array.from(atob(document.getElementById(source.id).textContent), (c) => c.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
    return new Uint8Array(await new Response(stream).arrayBuffer());
  }

  function compare(reference, prediction) {
    return reference.map((r, i) => {
      const p = prediction[i];
      return r === p ? 0 : p === 0 ? 1 : r === 0 ? 2 : 3;
    });
  }

  async function load(facts) {
    const image = facts.image && (await read(facts.image));
    const layers = [];
    for (const layer of facts.layers) {
      layers.push({ name: layer.name, classes: facts.classes, data: await read(layer) });
    }
    const find = (name) => layers.find((layer) => layer.name === name);
    if (find("reference") && find("prediction")) {
      const data = compare(find("reference").data, find("prediction").data);
      layers.push({ name: "errors", classes: ERRORS, data });
    }
    return { ...facts, image, layers };
  }

  function parseColor(color) {
    return [1, 3, 5].map((at) => parseInt(color.slice(at, at + 2), 16));
  }

  // The slice with the most voxels of the last layer that is not empty: errors, else labels.
  function findSlice(volume, axis) {
    const [nx, ny, nz] = volume.shape;
    const counts = new Uint32Array(volume.shape[axis]);
    const layer = [...volume.layers].reverse().find(({ data }) => data.some((value) => value));
    const data = layer ? layer.data : [];
    for (let i = 0; i < nx * ny * nz; i++) {
      if (data[i]) counts[[i % nx, Math.floor(i / nx) % ny, Math.floor(i / (nx * ny))][axis]]++;
    }
    const best = counts.indexOf(Math.max(...counts));
    return counts[best] ? best : volume.shape[axis] >> 1;
  }

  // Panels side by side: the image, and each layer over it.
  class Slices {
    constructor(canvas) {
      this.canvas = canvas;
      this.kind = "slices";
      new ResizeObserver(() => shown && this.draw()).observe(canvas);
      canvas.addEventListener("wheel", (event) => {
        event.preventDefault();
        moveTo(state.slices[state.plane] + (event.deltaY > 0 ? -1 : 1));
      }, { passive: false });
    }

    async show() {
      this.draw();
    }

    draw() {
      const ratio = window.devicePixelRatio || 1;
      const width = (this.canvas.width = Math.round(this.canvas.clientWidth * ratio));
      const height = (this.canvas.height = Math.round(this.canvas.clientHeight * ratio));
      const context = this.canvas.getContext("2d");
      context.fillStyle = "#0c0e12";
      context.fillRect(0, 0, width, height);
      const panels = [...(shown.image ? [null] : []), ...shown.layers];
      panels.forEach((layer, n) => this.drawPanel(context, layer, {
        left: (n * width) / panels.length, width: width / panels.length, height, ratio,
      }));
    }

    drawPanel(context, layer, { left, width, height, ratio }) {
      const [u, v] = [0, 1, 2].filter((axis) => axis !== state.plane);
      const [nu, nv] = [shown.shape[u], shown.shape[v]];
      const [mmU, mmV] = [nu * shown.spacing[u], nv * shown.spacing[v]];
      const text = 22 * ratio;
      const scale = Math.min((width - 12 * ratio) / mmU, (height - 2 * text) / mmV);
      const [w, h] = [mmU * scale, mmV * scale];
      const [x, y] = [left + (width - w) / 2, (height - h) / 2 + text / 4];
      context.imageSmoothingEnabled = false;
      context.drawImage(this.paint(layer, nu, nv, u, v), x, y, w, h);
      context.fillStyle = "#c7cdd8";
      context.textAlign = "center";
      context.font = `${13 * ratio}px system-ui, sans-serif`;
      context.fillText(layer ? layer.name : "image", left + width / 2, y - 7 * ratio);
      const [a, b, c, d] = EDGES[state.plane];
      context.font = `${12 * ratio}px system-ui, sans-serif`;
      for (const [letter, dx, dy] of [
        [a, 8 * ratio, h / 2], [b, w - 8 * ratio, h / 2], [c, w / 2, 14 * ratio], [d, w / 2, h - 5 * ratio],
      ]) context.fillText(letter, x + dx, y + dy);
    }

    paint(layer, nu, nv, u, v) {
      const steps = [1, shown.shape[0], shown.shape[0] * shown.shape[1]];
      const start = state.slices[state.plane] * steps[state.plane];
      const colors = layer ? layer.classes.map((c) => parseColor(c.color)) : [];
      const picture = new ImageData(nu, nv);
      for (let row = 0; row < nv; row++) {
        for (let column = 0; column < nu; column++) {
          const at = start + (nu - 1 - column) * steps[u] + (nv - 1 - row) * steps[v];
          const gray = shown.image ? shown.image[at] : 24;
          const color = layer && layer.data[at] ? colors[layer.data[at] - 1] : null;
          const share = color ? state.opacity : 0;
          for (let k = 0; k < 3; k++) {
            picture.data[4 * (row * nu + column) + k] = color
              ? (1 - share) * gray + share * color[k] : gray;
          }
          picture.data[4 * (row * nu + column) + 3] = 255;
        }
      }
      const canvas = new OffscreenCanvas(nu, nv);
      canvas.getContext("2d").putImageData(picture, 0, 0);
      return canvas;
    }
  }

  function makeNifti(volume, data) {
    const buffer = new ArrayBuffer(352 + data.length);
    const view = new DataView(buffer);
    view.setInt32(0, 348, true);
    [3, ...volume.shape, 1, 1, 1, 1].forEach((n, i) => view.setInt16(40 + 2 * i, n, true));
    view.setInt16(70, 2, true); // uint8
    view.setInt16(72, 8, true);
    [1, ...volume.spacing].forEach((mm, i) => view.setFloat32(76 + 4 * i, mm, true));
    view.setFloat32(108, 352, true); // where voxels begin
    view.setFloat32(112, 1, true); // slope
    view.setUint8(123, 2); // mm
    view.setInt16(254, 1, true); // the rows below are the affine
    for (let i = 0; i < 3; i++) view.setFloat32(280 + 20 * i, volume.spacing[i], true);
    [..."n+1"].forEach((c, i) => view.setUint8(344 + i, c.charCodeAt(0)));
    new Uint8Array(buffer, 352).set(data);
    return new File([buffer], "volume.nii");
  }

  class Niivue {
    static async start(canvas, library) {
      const self = new Niivue();
      self.kind = "niivue";
      self.library = library;
      self.viewer = new library.Niivue({
        backColor: [0.047, 0.055, 0.07, 1],
        crosshairColor: [0.6, 0.68, 0.82, 1],
        crosshairWidth: 0.15,
        dragAndDropEnabled: false,
        isRadiologicalConvention: true,
        loadingText: "",
        logLevel: "error",
        multiplanarShowRender: library.SHOW_RENDER.ALWAYS,
        multiplanarLayout: library.MULTIPLANAR_TYPE.GRID,
        tileMargin: 8,
        fontColor: [0.86, 0.89, 0.94, 1],
      });
      await self.viewer.attachToCanvas(canvas);
      self.viewer.addColormap("faint", { R: [0, 255], G: [0, 255], B: [0, 255], A: [0, 10], I: [0, 255] });
      self.viewer.onLocationChange = ({ vox }) => {
        state.slices = shown.shape.map((n, axis) => Math.min(n - 1, Math.max(0, Math.round(vox[axis]))));
        writeSlice();
      };
      return self;
    }

    async show() {
      const { viewer, library } = this;
      while (viewer.volumes.length) viewer.removeVolume(viewer.volumes[viewer.volumes.length - 1]);
      const gray = shown.image || new Uint8Array(shown.layers[0].data.length);
      viewer.addVolume(await library.NVImage.loadFromFile({
        file: makeNifti(shown, gray), name: "image.nii", colormap: "faint", cal_min: 0, cal_max: 255,
      }));
      for (const layer of shown.layers) {
        const volume = await library.NVImage.loadFromFile({
          file: makeNifti(shown, layer.data), name: "labels.nii", opacity: 0,
        });
        const colors = layer.classes.map((c) => parseColor(c.color));
        const [R, G, B] = [0, 1, 2].map((k) => [0, ...colors.map((color) => color[k])]);
        const I = [0, ...colors.map((_, n) => n + 1)];
        volume.setColormapLabel({ R, G, B, A: I.map((n) => (n ? 255 : 0)), I, labels: I.map(String) });
        viewer.addVolume(volume);
      }
      this.draw();
    }

    draw() {
      const { viewer, library } = this;
      viewer.volumes.forEach((volume, n) => {
        if (n) volume.opacity = n === state.layer + 1 ? state.opacity : 0;
      });
      const types = library.SLICE_TYPE;
      const planes = [types.SAGITTAL, types.CORONAL, types.AXIAL];
      viewer.setSliceType(state.multi ? types.MULTIPLANAR : planes[state.plane]);
      shown.shape.forEach((n, axis) => {
        viewer.scene.crosshairPos[axis] = (state.slices[axis] + 0.5) / n;
      });
      viewer.updateGLVolume();
    }
  }

  function hasWebGL2() {
    return Boolean(document.createElement("canvas").getContext("webgl2"));
  }

  async function startRenderer(stage) {
    const packed = document.getElementById("niivue");
    if (packed && hasWebGL2()) {
      const canvas = element("canvas");
      stage.replaceChildren(canvas);
      try {
        const code = new Blob([await read({ id: "niivue" })], { type: "text/javascript" });
        return await Niivue.start(canvas, await import(URL.createObjectURL(code)));
      } catch (error) {
        console.warn("NiiVue did not start, showing slices instead:", error);
      }
    }
    const canvas = element("canvas");
    stage.replaceChildren(canvas);
    return new Slices(canvas);
  }

  const slider = element("input", { type: "range", min: 0, value: 0 });
  const number = element("output");
  const opacity = element("input", { type: "range", min: 0, max: 1, step: 0.05, value: state.opacity });
  const legend = element("div", { className: "legend" });
  const groups = { cases: [], planes: [], layers: [] };

  function makeButtons(group, names, choose) {
    groups[group] = names.map((name, n) =>
      element("button", { type: "button", textContent: name, onclick: () => choose(n) }));
    return element("span", { className: "group" }, ...groups[group]);
  }

  function press(group, chosen) {
    groups[group].forEach((button, n) => button.setAttribute("aria-pressed", String(n === chosen)));
  }

  function writeSlice() {
    const [at, count] = [state.slices[state.plane], shown.shape[state.plane]];
    slider.max = count - 1;
    slider.value = at;
    number.textContent = `${PLANES[state.plane]} ${at + 1} of ${count}`;
    root.dataset.slice = at;
  }

  function writeLegend() {
    const layers = renderer.kind === "niivue" ? [shown.layers[state.layer]] : shown.layers;
    const classes = new Set(layers.flatMap((layer) => (layer ? layer.classes : [])));
    const spans = [...classes].map((c) => {
      const square = document.createElementNS("http://www.w3.org/2000/svg", "svg");
      square.setAttribute("width", 11);
      square.setAttribute("height", 11);
      const rect = document.createElementNS("http://www.w3.org/2000/svg", "rect");
      Object.entries({ width: 11, height: 11, rx: 2, fill: c.color, stroke: "#8d95a3" }).forEach(([k, v]) => rect.setAttribute(k, v));
      square.append(rect);
      const note = c.note ? [element("span", { textContent: c.note })] : [];
      return element("span", { className: "chip" }, square, c.name, ...note);
    });
    legend.replaceChildren(...spans);
  }

  function update() {
    press("planes", renderer.kind === "niivue" ? (state.multi ? 0 : 3 - state.plane) : 2 - state.plane);
    press("layers", state.layer);
    writeSlice();
    writeLegend();
    renderer.draw();
  }

  function moveTo(slice) {
    state.slices[state.plane] = Math.min(shown.shape[state.plane] - 1, Math.max(0, slice));
    update();
  }

  async function choose(index) {
    delete root.dataset.ready;
    state.number = index;
    shown = await load(cases[index]);
    state.layer = Math.min(state.layer, Math.max(0, shown.layers.length - 1));
    state.slices = [0, 1, 2].map((axis) => findSlice(shown, axis));
    press("cases", index);
    await renderer.show();
    update();
    root.dataset.ready = renderer.kind;
  }

  async function start() {
    const stage = element("div", { className: "stage" });
    root.replaceChildren(stage);
    renderer = await startRenderer(stage);
    const is3d = renderer.kind === "niivue";
    const planes = [...(is3d ? ["all and 3D"] : []), "axial", "coronal", "sagittal"];
    const names = cases[0].layers.map((layer) => layer.name);
    const compared = names.includes("reference") && names.includes("prediction");
    const buttons = makeButtons("cases", cases.map((c) => c.title), choose);
    const rows = cases.length > 1 ? [element("div", { className: "bar-row" }, buttons)] : [];
    rows.push(element("div", { className: "bar-row" },
      makeButtons("planes", planes, (n) => {
        state.multi = is3d && n === 0;
        state.plane = state.multi ? 2 : planes.length - 1 - n;
        update();
      }),
      ...(is3d && names.length
        ? [makeButtons("layers", compared ? [...names, "errors"] : names, (n) => { state.layer = n; update(); })]
        : []),
      element("label", {}, "slice", slider, number),
      ...(names.length ? [element("label", {}, "opacity", opacity)] : []),
    ));
    root.replaceChildren(...rows, stage, legend);
    slider.addEventListener("input", () => moveTo(Number(slider.value)));
    opacity.addEventListener("input", () => { state.opacity = Number(opacity.value); update(); });
    await choose(0);
  }

  start().catch((error) => {
    console.error(error);
    root.append(element("p", { className: "note", textContent: `The viewer failed: ${error.message}` }));
  });
})();
