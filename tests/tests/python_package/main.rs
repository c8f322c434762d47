//! The suite on the Python package, in a child process: numpy's arrays on the CPU, and torch's tensors on a GPU.
//!
//! `FLASH_SAMPLING_PYTHON` names the Python interpreter. The tests are skipped if it cannot import the package.

mod package;

use flash_sampling_conformance::{BuildError, SamplerFactory, laws, suite};
use flash_sampling_core::reference::ReferenceVariant;
use flash_sampling_core::{Description, Head, Matrix, PerturbedArgmax, Plan, RowParams, SampleError, Samples};
use package::Package;

suite!(numpy, Package::Numpy);
suite!(torch, Package::Torch);

/// A negative control: the package, with draws at half of each row's position.
struct HalfPosition;

struct AtHalf<'w>(Box<dyn PerturbedArgmax + 'w>);

impl SamplerFactory for HalfPosition {
    fn name(&self) -> String {
        format!("{}/half", Package::Numpy.name())
    }

    fn unavailable(&self) -> Option<String> {
        Package::Numpy.unavailable()
    }

    fn reference_variant(&self, head: &Head<'_>) -> Option<ReferenceVariant> {
        Package::Numpy.reference_variant(head)
    }

    fn build<'w>(&self, head: Head<'w>, plan: Plan) -> Result<Box<dyn PerturbedArgmax + 'w>, BuildError> {
        Ok(Box::new(AtHalf(Package::Numpy.build(head, plan)?)))
    }
}

impl PerturbedArgmax for AtHalf<'_> {
    fn description(&self) -> Description {
        self.0.description()
    }

    fn sample(&mut self, input: Matrix<'_>, rows: &[RowParams<'_>], out: &mut Samples) -> Result<(), SampleError> {
        let mut rows = rows.to_vec();
        rows.iter_mut().for_each(|row| row.position /= 2);
        self.0.sample(input, &rows, out)
    }
}

#[test]
fn laws_reject_the_package_at_wrong_positions() {
    let names = ["values_are_stable", "positions_are_independent", "scores_are_logit_plus_noise"];
    if suite::runs(&HalfPosition.name(), HalfPosition.unavailable(), 1) {
        for law in names.map(|name| laws::named(name).expect("a law of the table")) {
            let failure = law.check(&suite::trial(&HalfPosition)).expect_err("all draws are at wrong positions");
            println!("{failure}");
        }
    }
}
