//! Alignment checks of device addresses. After a misaligned access, every later call of the context fails.

use crate::abi::{DeviceAddress, Draw, Row};
use crate::error::CudaError;

/// Checks the alignment of the rows and draws of a launch.
pub(crate) fn check_rows(rows: DeviceAddress<Row>, draws: DeviceAddress<Draw>) -> Result<(), CudaError> {
    check_aligned("rows", rows)?;
    check_aligned("draws", draws)
}

/// Checks that an address is a multiple of its type's alignment, 4 or 8.
pub(crate) fn check_aligned<T>(what: &'static str, address: DeviceAddress<T>) -> Result<(), CudaError> {
    let reason = match align_of::<T>() {
        8 => "their address is not a multiple of 8",
        _ => "their address is not a multiple of 4",
    };
    if address.is_aligned() { Ok(()) } else { Err(CudaError::Layout { what, reason }) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::abi::RowFilters;

    #[test]
    fn an_address_within_an_element_is_named() {
        assert_eq!((align_of::<Row>(), align_of::<Draw>(), align_of::<RowFilters>()), (8, 4, 8));
        let check = |rows, draws| check_rows(DeviceAddress::new(rows), DeviceAddress::new(draws));
        assert_eq!(check(4096, 4100), Ok(()));
        assert!(matches!(check(4100, 4096), Err(CudaError::Layout { what: "rows", .. })));
        assert!(matches!(check(0, 2), Err(CudaError::Layout { what: "draws", .. })));
        let log_z = check_aligned("log Z", DeviceAddress::<f64>::new(12));
        assert!(matches!(log_z, Err(CudaError::Layout { what: "log Z", .. })));
    }
}
