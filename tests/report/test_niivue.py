import base64
import gzip

from unet3d.report.niivue import find_niivue


def test_the_package_has_niivue_as_a_module_and_its_license():
    found = find_niivue()
    module = gzip.decompress(base64.b64decode(found.packed)).decode()
    exports = module[module.rindex("export{") :]
    for name in ("Niivue", "NVImage", "SLICE_TYPE", "SHOW_RENDER", "MULTIPLANAR_TYPE"):
        assert name in exports
    assert "Redistribution and use" in found.license
