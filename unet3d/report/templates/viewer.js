// Show the cases of a page with NiiVue, in place of their pictures.
"use strict";
(async () => {
  const cases = JSON.parse(document.getElementById("cases-data").textContent);
  const root = document.getElementById("viewer");
  const VIEWS = ["all and 3D", "axial", "coronal", "sagittal"];
  const AXES = [2, 2, 1, 0]; // of each view: the axis that the slider moves along
  let shown = cases[0];
  let view = 0;
  let layer = 0;

  function element(name, properties = {}, ...children) {
    const made = Object.assign(document.createElement(name), properties);
    made.append(...children);
    return made;
  }

  function makeChoice(name, options, choose) {
    const labels = options.map((option, n) => element("label", {},
      element("input", { type: "radio", name, checked: n === 0, onchange: () => choose(n) }), option));
    return element("span", { className: "group" }, ...labels);
  }

  async function importNiivue() {
    const packed = atob(document.getElementById("niivue").textContent);
    const bytes = Uint8Array.from(packed, (c) => c.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    const code = new Blob([await new Response(stream).arrayBuffer()], { type: "text/javascript" });
    return import(URL.createObjectURL(code));
  }

  if (!document.createElement("canvas").getContext("webgl2")) {
    root.append(element("p", { className: "note", textContent: "The 3D viewer needs WebGL 2." }));
    return;
  }
  const { Niivue, NVImage, SLICE_TYPE, SHOW_RENDER, MULTIPLANAR_TYPE } = await importNiivue();
  const TYPES = [SLICE_TYPE.MULTIPLANAR, SLICE_TYPE.AXIAL, SLICE_TYPE.CORONAL, SLICE_TYPE.SAGITTAL];
  const viewer = new Niivue({
    backColor: [0.047, 0.055, 0.07, 1],
    crosshairColor: [0.6, 0.68, 0.82, 1],
    crosshairWidth: 0.15,
    dragAndDropEnabled: false,
    fontColor: [0.86, 0.89, 0.94, 1],
    isRadiologicalConvention: true,
    loadingText: "",
    logLevel: "error",
    multiplanarLayout: MULTIPLANAR_TYPE.GRID,
    multiplanarShowRender: SHOW_RENDER.ALWAYS,
    tileMargin: 8,
  });

  const slider = element("input", { type: "range", min: 0, oninput: moveSlice });
  const number = element("output");
  const opacity = element("input", { type: "range", min: 0, max: 1, step: 0.05, value: 0.6, oninput: draw });
  const layers = element("span", { className: "group" });
  const legend = element("div", { className: "legend" });
  const canvas = element("canvas");
  root.append(
    element("div", { className: "bar-row", hidden: cases.length < 2 },
      makeChoice("case", cases.map((c) => c.title), (n) => show(cases[n]))),
    element("div", { className: "bar-row" },
      makeChoice("view", VIEWS, (n) => { view = n; draw(); }),
      layers,
      element("label", {}, "slice", slider, number),
      element("label", {}, "opacity", opacity)),
    element("div", { className: "stage" }, canvas),
    legend,
  );

  function moveSlice() {
    viewer.scene.crosshairPos[AXES[view]] = (Number(slider.value) + 0.5) / shown.shape[AXES[view]];
    draw();
  }

  function writeSlice() {
    const count = shown.shape[AXES[view]];
    const at = Math.min(count - 1, Math.floor(viewer.scene.crosshairPos[AXES[view]] * count));
    slider.max = count - 1;
    slider.value = at;
    number.textContent = `${VIEWS[view || 1]} ${at + 1} of ${count}`;
  }

  function draw() {
    viewer.volumes.forEach((volume, n) => {
      if (n) volume.opacity = n === layer + 1 ? Number(opacity.value) : 0;
    });
    viewer.setSliceType(TYPES[view]);
    viewer.updateGLVolume();
    writeSlice();
    const classes = shown.layers.length ? shown.layers[layer].classes : [];
    legend.replaceChildren(...classes.map((c) => {
      const square = element("i");
      square.style.background = c.color;
      return element("span", { className: "chip" }, square, c.name);
    }));
  }

  async function addVolume(base64, options) {
    viewer.addVolume(await NVImage.loadFromBase64({ base64, name: "volume.nii.gz", ...options }));
  }

  async function show(chosen) {
    delete root.dataset.ready;
    shown = chosen;
    while (viewer.volumes.length) viewer.removeVolume(viewer.volumes[viewer.volumes.length - 1]);
    await addVolume(shown.image, { colormap: "faint", cal_min: 0, cal_max: 255 });
    for (const { file, classes } of shown.layers) {
      await addVolume(file, { opacity: 0 });
      const colors = classes.map((c) => [1, 3, 5].map((at) => parseInt(c.color.slice(at, at + 2), 16)));
      const [R, G, B] = [0, 1, 2].map((k) => [0, ...colors.map((color) => color[k])]);
      const I = [0, ...colors.map((_, n) => n + 1)];
      viewer.volumes.at(-1).setColormapLabel({ R, G, B, A: I.map((n) => (n ? 255 : 0)), I, labels: I.map(String) });
    }
    shown.slices.forEach((slice, axis) => {
      viewer.scene.crosshairPos[axis] = (slice + 0.5) / shown.shape[axis];
    });
    draw();
    root.dataset.ready = true;
  }

  await viewer.attachToCanvas(canvas);
  viewer.addColormap("faint", { R: [0, 255], G: [0, 255], B: [0, 255], A: [0, 10], I: [0, 255] });
  viewer.onLocationChange = writeSlice;
  const names = shown.layers.map((l) => l.name);
  layers.replaceWith(makeChoice("layer", names, (n) => { layer = n; draw(); }));
  document.getElementById("pictures").hidden = true;
  await show(shown);
})().catch((error) => console.error("The viewer failed, so pictures are shown:", error));
