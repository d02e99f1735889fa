from types import SimpleNamespace

from tests.data.helpers.cases import noise, write_case
from unet3d.data.findings import Finding, InvalidDatasetError
from unet3d.data.usable_cases import UsableCases


def test_cases_with_problems_that_are_found_one_after_the_other_are_all_skipped(tmp_path):
    cases = [write_case(tmp_path, noise(8, 8, 8), name=name) for name in ("a", "b", "c")]
    layout = SimpleNamespace(list_cases=lambda: cases, find_problems=list)
    usable = UsableCases(SimpleNamespace(skip_invalid_cases=True), layout, ["CT"])

    def refuse_the_first_two(cases):
        if len(cases) > 1:
            message = "is damaged"
            problem = Finding(case=cases[0].name, file=None, message=message, advice="remove it")
            raise InvalidDatasetError([problem])
        return [case.name for case in cases]

    assert usable.run_on_valid_cases(refuse_the_first_two) == ["c"]
    assert [finding.case for finding in usable.skipped] == ["a", "b"]
