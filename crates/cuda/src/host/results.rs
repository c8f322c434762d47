//! From what the kernels leave to what core says of a row, and the samplers that are a [`HostSampler`](crate::host::host_sampler::HostSampler).

use crate::abi::{Draw, status};
use flash_sampling_core::{Candidate, MassHistogram, RowError, Samples, Winner, params};

/// The row's result of the kernel, as core says it.
pub(crate) fn candidate(draw: &Draw) -> Result<Candidate, RowError> {
    match draw.status {
        status::DRAWN => Ok(Candidate { winner: Winner::new(draw.score, draw.token), logit: draw.logit }),
        status::NAN => Err(RowError::NaN { token: draw.token }),
        status::POSITIVE_INFINITY => Err(RowError::PositiveInfinity { token: draw.token }),
        _ => Err(RowError::NoFiniteLogit),
    }
}

/// Appends the row whose draws are next in `results`, with its masses and largest logits when it asked; or its error.
pub(crate) fn push_row(
    results: &mut &[Draw],
    row: &params::Row<'_>,
    mass: Option<&MassHistogram>,
    top: &[Candidate],
    out: &mut Samples,
) -> Result<(), RowError> {
    let (draws, rest) = results.split_at(row.draws as usize);
    *results = rest;
    draws.iter().try_for_each(|draw| candidate(draw).map(drop))?;
    out.push_row(draws.iter().flat_map(candidate), mass, top);
    Ok(())
}

/// Says of the row appended last how many passes its filters took: those that the GPU tried, and where it was asked for in the
/// end, those of its answer.
pub(crate) fn note_tries(tries: u32, is_asked: bool, out: &mut Samples) {
    if tries > 0 {
        let last = out.row(out.len() - 1).map_or(0, |row| row.passes);
        out.set_passes(if is_asked { tries + last } else { tries });
    }
}

/// Makes a public sampler of a [`HostSampler`] in a tuple struct.
macro_rules! impl_sampler {
    ($sampler:ident $(, $($more:item)*)?) => {
        impl flash_sampling_core::PerturbedArgmax for $sampler<'_> {
            fn capabilities(&self) -> flash_sampling_core::Capabilities {
                self.0.capabilities()
            }

            fn shape(&self) -> flash_sampling_core::Shape {
                self.0.shape()
            }

            fn plan(&self) -> flash_sampling_core::Plan {
                self.0.plan()
            }

            fn sample(
                &mut self,
                input: flash_sampling_core::Matrix<'_>,
                rows: &[flash_sampling_core::RowParams<'_>],
                out: &mut flash_sampling_core::Samples,
            ) -> Result<(), flash_sampling_core::SampleError> {
                self.0.sample(input, rows, out)
            }

            $($($more)*)?
        }
    };
}
pub(crate) use impl_sampler;
