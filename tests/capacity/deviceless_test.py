"""Collectives read from a program's text; few layers stand for many."""

from absl.testing import absltest

from rollplex_jax.capacity import deviceless, plan
from tests.capacity.cases import tiny
from tests.helpers import devices

devices.use_virtual_devices()


class CollectivesTest(absltest.TestCase):

  def test_read_from_a_program(self):
    text = """HloModule m
%body (p: f32[8]) -> f32[8] {
  %ag = f32[64]{0} all-gather(%p), replica_groups=[4,8]<=[32], dimensions={0}
}
%open (p: f32[8]) -> f32[8] {
  %ar = bf16[10]{0} all-reduce(%p), replica_groups={{0,8},{1,9}}, to_apply=%sum
}
ENTRY %main (p: f32[8]) -> f32[8] {
  %w = f32[8]{0} while(%p), condition=%c, body=%body, backend_config={"known_trip_count":{"n":"3"}}
  %v = f32[8]{0} while(%w), condition=%c, body=%open
  %rs = f32[4]{0} reduce-scatter(%v), replica_groups=[8,4]<=[4,8]T(1,0), to_apply=%sum
}
"""
    found = {c.kind: c for c in deviceless.collectives(text, 8)}
    make = deviceless.Collective
    self.assertEqual(found["all-gather"], make(
        kind="all-gather", bytes=3 * 256, count=3, group=8, far=False))
    self.assertEqual(found["all-reduce"], make(
        kind="all-reduce", bytes=20, count=1, group=2, far=True, loop=0))
    self.assertEqual(found["reduce-scatter"], make(
        kind="reduce-scatter", bytes=16, count=1, group=4, far=True))


  def test_groups(self):
    """Of 32 devices in hosts of 8, as compilers have been seen to write them.
    """
    axes = "mesh['axis_0'=8,'axis_1'=1,'axis_2'=4], device_ids=([4,4,2]T(0,2,1))"
    for groups, expected in {
        "[4,8]<=[32]": (8, False), "[8,4]<=[4,8]T(1,0)": (4, True),
        "[8,4]<=[4,4,2]T(0,2,1)": (4, False), "{{0,8},{1,9}}": (2, True),
        "mesh['a'=4,'b'=8] {'b'}": (8, False),
        "mesh['a'=4,'b'=8] {'a'}": (4, True),
        "mesh['a'=4,'b'=8] {'b':(2)4}": (4, False),
        f"{axes} {{'axis_0'}}": (8, True), f"{axes} {{'axis_2'}}": (4, False),
        "mesh['a'=8,'b'=4], device_ids=([4,8]T(1,0)) {'b'}": (4, True),
    }.items():
      program = f"""ENTRY %main (p: f32[8]) -> f32[8] {{
  %ar = f32[8]{{0}} all-reduce(%p), replica_groups={groups}, to_apply=%sum
}}"""
      (found,) = deviceless.collectives(program, 8)
      self.assertEqual((found.group, found.far), expected, msg=groups)


class DepthTest(absltest.TestCase):

  def test_line_through_depths(self):
    at = lambda d: deviceless.Compiled(
        argument_bytes=0, output_bytes=50 + 3 * d, temp_bytes=100 + 10 * d,
        alias_bytes=d, seconds=0.0, collectives=(deviceless.Collective(
            kind="all-reduce", bytes=5 * d, count=d, group=2, far=False),))
    found = plan.at_depth(tiny(), "score", {2: at(2), 4: at(4)}, 64)
    self.assertEqual(found.need.temp_bytes, 740)
    self.assertEqual(found.need.added_bytes, 50 + 2 * 64)
    self.assertEqual((found.collectives[0].bytes, found.collectives[0].count),
                     (320, 64))
    # All there is was compiled.
    found = plan.at_depth(tiny(), "score", {4: at(4)}, 4)
    self.assertEqual(found.need.temp_bytes, 140)


if __name__ == "__main__":
  absltest.main()
