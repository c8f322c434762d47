//! A sampler without its weight.

use crate::error::CpuError;
use crate::scan::engine::{CHUNK, Engine};
use crate::scan::packed_input::PackedInput;
use crate::scan::requests::HeadLogits;
use crate::variants::tiled::{HeadScan, Tiled};
use flash_sampling_core::backend::Driver;
use flash_sampling_core::{DType, Head};

/// The plan of a [`Tiled`] sampler, without the borrow of its weight.
///
/// For an owner whose weight can be borrowed only for one call at a time, for example behind a lock: attach, sample,
/// detach. This allocates no memory and makes no new plan.
#[derive(Debug)]
pub struct DetachedTiled {
    engine: Engine,
    hidden: PackedInput,
    driver: Driver,
    weight: (usize, usize, DType),
}

fn size(head: &Head<'_>) -> (usize, usize, DType) {
    let weight = head.weight();
    (weight.rows(), weight.cols(), weight.dtype())
}

impl Tiled<'_> {
    /// Releases the weight and keeps the plan.
    pub fn detach(self) -> DetachedTiled {
        let Tiled { scan: HeadScan { engine, logits: HeadLogits { head, hidden }, .. }, driver } = self;
        DetachedTiled { weight: size(&head), engine, hidden, driver }
    }
}

impl DetachedTiled {
    /// Restores the sampler, over a head with a weight of the same size and type. With [`Plan::canonical`], a
    /// shadow or a quantised weight, the values must also be the same, because bounds depend on them.
    ///
    /// # Errors
    /// [`CpuError::OtherWeight`]; then the plan is lost.
    ///
    /// [`Plan::canonical`]: flash_sampling_core::Plan
    pub fn attach(self, head: Head<'_>) -> Result<Tiled<'_>, CpuError> {
        if size(&head) != self.weight {
            return Err(CpuError::OtherWeight { planned: self.weight, found: size(&head) });
        }
        let DetachedTiled { engine, hidden, driver, .. } = self;
        Ok(Tiled { scan: HeadScan { engine, logits: HeadLogits { head, hidden }, chunk: CHUNK }, driver })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::CpuOptions;
    use flash_sampling_core::{Matrix, PerturbedArgmax, Plan, RowParams, Samples};

    #[test]
    fn it_draws_as_before_and_refuses_another_weight() {
        let weight: Vec<f32> = (0..500 * 8).map(|i| (i as f32 * 0.7).sin()).collect();
        let hidden = [0.5f32, -1.0, 2.0, 0.25, 1.0, 0.0, -0.5, 1.5];
        let head = Head::new(Matrix::new(&weight, 500, 8).unwrap()).unwrap();
        let mut sampler = Tiled::new(head, Plan::default(), &CpuOptions::default()).unwrap();
        let draw = |sampler: &mut Tiled<'_>, position| {
            let mut out = Samples::new();
            let row = RowParams { position, ..RowParams::default() };
            sampler.sample(Matrix::new(&hidden, 1, 8).unwrap(), &[row], &mut out).unwrap();
            out.row(0).unwrap().draws[0]
        };
        let before: Vec<_> = (0..50).map(|position| draw(&mut sampler, position)).collect();
        for (position, expected) in (0..50).zip(before) {
            sampler = sampler.detach().attach(head).unwrap();
            assert_eq!(draw(&mut sampler, position), expected);
        }
        let shorter = Head::new(Matrix::new(&weight[..400 * 8], 400, 8).unwrap()).unwrap();
        assert!(matches!(sampler.detach().attach(shorter), Err(CpuError::OtherWeight { .. })));
    }
}
