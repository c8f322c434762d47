//! The Hopper kernels of a planned head, and the weight's tensor maps.

use crate::abi::{Call, Maps, TensorMap, WeightScales};
use crate::device::fused_hopper::{FusedVariant, Loaded, Tile};
use crate::device::scaled_hidden::HiddenScaler;
use crate::device::{Device, DeviceHead, DeviceMatrix, FusedOutput, Queue, Residency, tensor_map};
use crate::error::CudaError;
use std::sync::Arc;

/// The Hopper kernels, and the weight's tensor maps.
#[derive(Debug)]
pub(crate) struct Hopper {
    kernels: Vec<Arc<Loaded>>,
    /// Other variants, each loaded at its first launch.
    variants: Vec<Arc<Loaded>>,
    weight: TensorMap,
    granule: TensorMap,
    scales: WeightScales,
    /// The launch that copies hidden states to f16, for a weight in fp8 or int8.
    scaler: Option<HiddenScaler>,
}

impl Hopper {
    /// Loads the kernels for a weight that they [support](DeviceHead::suits_hopper).
    pub(crate) fn new(head: &DeviceHead, max_rows: usize, device: &Arc<Device>) -> Result<Self, CudaError> {
        let weight = &head.weight;
        let tiles = Tile::up_to(max_rows, weight.dtype, FusedVariant::Plain);
        let kernels = tiles.map(|tile| device.kernel(tile)).collect::<Result<Vec<_>, _>>()?;
        let columns = kernels.last().map_or(0, |kernel| kernel.tile.columns as usize);
        let scaler = head.can_scale_sums().then(|| HiddenScaler::new(columns, weight.cols, device)).transpose()?;
        Ok(Hopper {
            kernels,
            variants: Vec::new(),
            scaler,
            weight: tensor_map::encode(weight, 64)?,
            granule: tensor_map::encode(weight, 16)?,
            scales: head.weight_scales(),
        })
    }

    /// The maximum number of rows of a launch.
    pub(crate) fn max_rows(&self) -> usize {
        self.kernels.last().map_or(0, |kernel| kernel.tile.columns as usize)
    }

    /// Records that every launch has run: see [`Scratch::mark_idle`](crate::device::Scratch::mark_idle).
    pub(crate) fn mark_idle(&mut self) {
        self.scaler.iter_mut().for_each(HiddenScaler::mark_idle);
    }

    /// Launches the kernel for these rows, at most [`Hopper::max_rows`].
    pub(crate) fn launch(
        &mut self,
        queue: Queue<'_>,
        hidden: &DeviceMatrix,
        call: Call,
        (output, mut residency): (&FusedOutput, Residency),
        device: &Device,
    ) -> Result<(), CudaError> {
        let kernel = self.kernel(hidden.rows, output, device)?;
        let (cluster, box_rows) = (kernel.tile.cluster, kernel.tile.loaded_rows(hidden.rows));
        let mut maps = Maps { weight: self.weight, granule: self.granule, scales: self.scales, ..Maps::default() };
        if let Some(scaler) = &mut self.scaler {
            let copies = scaler.launch(queue, hidden, cluster * box_rows)?;
            maps.hidden = tensor_map::encode(&copies.matrix, box_rows)?;
            (maps.factors, maps.bf16_row) = (copies.factors, copies.bf16_row);
            // The kernel starts early, and waits for the copies itself.
            residency = Residency::Early;
        } else {
            maps.hidden = tensor_map::encode(hidden, box_rows)?;
        }
        let blocks = kernel.blocks(call.tokens, device.multiprocessors());
        kernel.launch(queue, blocks, call, maps, (output, residency))
    }

    /// Loads the kernels for this output, for every planned number of rows.
    pub(crate) fn prepare(&mut self, output: &FusedOutput, device: &Device) -> Result<(), CudaError> {
        let columns: Vec<usize> = self.kernels.iter().map(|kernel| kernel.tile.columns as usize).collect();
        columns.into_iter().try_for_each(|rows| self.kernel(rows, output, device).map(drop))
    }

    /// The kernel for a call of `rows` rows, at most [`Hopper::max_rows`].
    fn kernel(&mut self, rows: usize, output: &FusedOutput, device: &Device) -> Result<Arc<Loaded>, CudaError> {
        let fits = |kernel: &&Arc<Loaded>| kernel.tile.columns as usize >= rows;
        let planned = self.kernels.iter().find(fits).expect("a call has at most `max_rows` rows");
        if matches!(output, FusedOutput::Plain) {
            return Ok(planned.clone());
        }
        let tile = planned.tile.with(output);
        let at = match self.variants.iter().position(|kernel| kernel.tile == tile) {
            Some(at) => at,
            None => {
                self.variants.push(device.kernel(tile)?);
                self.variants.len() - 1
            }
        };
        Ok(self.variants[at].clone())
    }
}
